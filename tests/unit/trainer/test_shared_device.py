"""Whole RL steps in which spot workers and the actor take turns on a device, and when workers warm up on it."""

import pytest
from fake_fleet import FakeCall, ended
from rl_steps import STOP_S, rest_of_step, sampled, train, trained_step

from verl_tlt.trainer.controller import WARM_AGAIN_S, WARM_UP_S
from verl_tlt.trainer.waits import CallFailed

DEAD = CallFailed("RayActorError: gone", died=True)


def test_where_the_device_is_the_actors_the_next_session_judges_what_was_merged(filled):
    controller, fleet = filled(of_fleet={"to_judge": False})
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
    assert fleet.called("revert") == [("served",)]
    assert fleet.called("merge") == [], "what was learned on top of it has gone with it"
    assert len(fleet.staged) == 1 and controller.guard.counts.total() == 0


def test_a_slow_session_is_off_the_device_before_the_actor_is_on_it(filled):
    controller, fleet = filled(of_fleet={"stop_s": STOP_S / 3})
    trained_step(controller, fleet, 2)
    assert fleet.restarts == []


def test_workers_warm_up_before_engines_hold_weights_and_one_that_does_not_costs_itself(run, clock, took):
    warming = {"a": ended(None), "b": ended(CallFailed("out of memory")), "c": ended(DEAD), "d": FakeCall(clock)}
    built = []
    assert took(lambda: built.extend(run("abcd", of_fleet={"warming": warming}))) == pytest.approx(WARM_UP_S)
    controller, fleet = built
    order = [call[0] for call in fleet.calls]
    assert order.index("start_spot") < order.index("warm_up") < order.index("calibrate")
    assert fleet.restarts == ["c", "d"], "dead, or still on the device when engines wake up"
    assert controller.spot and controller.guard.counts == {"warm-up": 3}


def test_workers_that_replace_others_warm_up_outside_a_bubble_before_they_train(filled):
    controller, fleet = filled()
    fleet.warming, fleet.starting = {"b": ended(None)}, {"b"}  # a successor has not rehearsed, and is still starting
    for step in (2, 3):
        sampled(controller, step)
        controller.warm_up(step)
        rest_of_step(controller, fleet, step)
    assert fleet.called("warm_up") == fleet.called("train") == []
    fleet.starting.clear()
    controller.warm_up(4)
    assert fleet.called("warm_up") == [(("b",),)]
    rest_of_step(controller, fleet, 4)
    train(controller, fleet, 5)
    controller.warm_up(5)
    assert len(fleet.called("train")) == len(fleet.called("warm_up")) == 1, "once is enough"


@pytest.mark.parametrize(
    ("error", "waited", "restarts"),
    [(None, WARM_AGAIN_S, ["b"]), (DEAD, 0.0, ["b"]), (CallFailed("out of memory"), 0.0, [])],
    ids=["late", "dead", "out of memory"],
)
def test_a_successor_that_does_not_warm_up_costs_a_bounded_and_charged_time(
    filled, clock, took, error, waited, restarts
):
    controller, fleet = filled()
    fleet.warming["b"] = ended(error) if error else FakeCall(clock)
    assert took(controller.warm_up, 2) == pytest.approx(waited)
    assert fleet.restarts == restarts
    assert rest_of_step(controller, fleet, 2)["tlt/overhead_warm_up_s"] == pytest.approx(waited)
    assert controller.guard.counts == {"warm-up": 1}
