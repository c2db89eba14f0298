"""Whole RL steps in which spot workers and the actor take turns on a device, and when workers warm up on it."""

import pytest
from fake_fleet import FakeCall, FakeFleet, ended
from rl_steps import STOP_S, called, rest_of_step, sampling, train

from verl_tlt.trainer.controller import WARM_AGAIN_S, WARM_UP_S
from verl_tlt.trainer.waits import CallFailed


def trained_step(controller, fleet, step):
    """A step with a session; nobody may be on a device from the end of sampling on. Returns the metrics."""
    trained = len(called(fleet, "train"))
    with sampling(controller, fleet, step):
        assert len(called(fleet, "train")) > trained
    assert fleet.on_device == set(), "a guest is on the device when the actor comes"
    metrics = rest_of_step(controller, fleet, step)
    assert len(called(fleet, "train")) == trained + 1 and fleet.on_device == set()
    return metrics


def test_where_the_device_is_the_actors_the_next_session_judges_what_was_merged(filled, clock):
    fleet = FakeFleet("a", "b", clock=clock)
    fleet.to_judge = False
    controller, _ = filled(fleet=fleet)
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
def test_a_slow_session_is_off_the_device_before_the_actor_is_on_it(filled, clock, stop_s, deaf):
    fleet = FakeFleet("a", "b", clock=clock)
    fleet.stop_s, fleet.deaf = stop_s, {"b"} if deaf else set()
    controller, _ = filled(fleet=fleet)
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


def test_workers_that_replace_others_warm_up_outside_a_bubble_before_they_train(filled, clock):
    fleet = FakeFleet("a", "b", clock=clock)
    controller, _ = filled(fleet=fleet)
    fleet.deaf = {"b"}
    train(controller, fleet, 2)
    assert fleet.restarts == ["b"]
    fleet.deaf.clear()
    fleet.warming["b"] = ended(None)  # the successor has not rehearsed, and is still starting
    fleet.starting = {"b"}
    fleet.calls.clear()
    for step in range(3, 6):
        with sampling(controller, fleet, step):
            pass
        controller.warm_up(step)
        rest_of_step(controller, fleet, step)
    assert called(fleet, "warm_up") == called(fleet, "train") == []
    fleet.starting.clear()
    controller.warm_up(6)
    assert called(fleet, "warm_up") == [(("b",),)]
    rest_of_step(controller, fleet, 6)
    train(controller, fleet, 7)
    assert len(called(fleet, "train")) == 1 and called(fleet, "warm_up") == [(("b",),)], "once is enough"


@pytest.mark.parametrize("answer", ["late", "dead", "out of memory"])
def test_a_successor_that_does_not_warm_up_costs_a_bounded_and_charged_time(filled, clock, answer):
    fleet = FakeFleet("a", "b", clock=clock)
    controller, _ = filled(fleet=fleet)
    failures = {"dead": ended(CallFailed("gone", died=True)), "out of memory": ended(CallFailed("no room"))}
    fleet.warming["b"] = failures.get(answer) or FakeCall(clock)
    began = clock.now
    controller.warm_up(2)
    waited = WARM_AGAIN_S if answer == "late" else 0.0
    assert clock.now - began == pytest.approx(waited)
    assert fleet.restarts == ([] if answer == "out of memory" else ["b"])
    metrics = rest_of_step(controller, fleet, 2)
    assert metrics["tlt/overhead_warm_up_s"] == pytest.approx(waited)
    assert controller.guard.counts == {"warm-up": 1}
