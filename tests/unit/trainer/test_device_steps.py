"""Whole RL steps where the spot workers' devices are the actor's outside sessions: who is on them when."""

import pytest
from fake_fleet import FakeCall, FakeFleet, ended
from rl_steps import STOP_S, called, fill_buffers, rest_of_step, sampling

from verl_tlt.trainer.controller import WARM_UP_S
from verl_tlt.trainer.fleet import CallFailed


def trained_step(controller, fleet, step):
    """A step with a session; nobody may be on a device from the end of sampling on. Returns the metrics."""
    trained = len(called(fleet, "train"))
    with sampling(controller, fleet, step):
        assert len(called(fleet, "train")) > trained
    assert fleet.on_device == set(), "a guest is on the device when the actor comes"
    metrics = rest_of_step(controller, fleet, step)
    assert len(called(fleet, "train")) == trained + 1 and fleet.on_device == set()
    return metrics


def test_where_the_device_is_the_actors_the_next_session_judges_what_was_merged(run, clock):
    fleet = FakeFleet("a", "b", clock=clock)
    fleet.to_judge = False
    controller, _ = run(fleet=fleet)
    fill_buffers(controller, fleet)
    first = trained_step(controller, fleet, 2)
    assert fleet.staged == [] and first["tlt/publish_skipped"] == 1
    fleet.calls.clear()
    assert trained_step(controller, fleet, 3)["tlt/drafter_version"] == 1
    assert fleet.staged[0].acceptance == pytest.approx((0.6,) * 3, abs=0.01)
    update = [call[0] for call in fleet.calls if call[0] in ("export", "merge", "stage", "keep_as_served")]
    assert update == ["export", "merge", "stage", "keep_as_served"], "what was judged is exported, not what came after"
    fleet.candidate_acceptance = 0.4
    fleet.calls.clear()
    trained_step(controller, fleet, 4)
    assert called(fleet, "revert") == [("served",)]
    assert called(fleet, "merge") == [], "what was learned on top of it has gone with it"
    assert len(fleet.staged) == 1 and controller.guard.counts.total() == 0


@pytest.mark.parametrize(("stop_s", "deaf"), [(STOP_S / 3, False), (0.0, True)])
def test_a_slow_session_is_off_the_device_before_the_actor_is_on_it(run, clock, stop_s, deaf):
    fleet = FakeFleet("a", "b", clock=clock)
    fleet.stop_s, fleet.deaf = stop_s, {"b"} if deaf else set()
    controller, _ = run(fleet=fleet)
    fill_buffers(controller, fleet)
    trained_step(controller, fleet, 2)
    assert fleet.restarts == (["b"] if deaf else [])


def test_workers_warm_up_before_engines_hold_weights_and_one_that_does_not_costs_itself(run, clock):
    fleet = FakeFleet("a", "b", "c", "d", clock=clock)
    dead = CallFailed("RayActorError: gone", died=True)
    fleet.warming = {"a": ended(None), "b": ended(CallFailed("out of memory")), "c": ended(dead), "d": FakeCall(clock)}
    began = clock.now
    controller, _ = run(fleet=fleet)
    assert clock.now - began == pytest.approx(WARM_UP_S)
    order = [call[0] for call in fleet.calls]
    assert order.index("start_spot") < order.index("warm_up") < order.index("calibrate")
    assert fleet.restarts == ["c", "d"], "dead, or still on the device when engines wake up"
    assert controller.spot and controller.guard.counts == {"warm-up": 3}
