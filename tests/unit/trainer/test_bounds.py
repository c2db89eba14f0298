"""Each bound of the trainer's waits, hit once: no answer comes, the step goes on, and who is silent is replaced."""

import contextlib
import functools

import pytest
from fake_fleet import FakeCall, ended
from rl_steps import LOOKS_S, STOP_S, merged, rest_of_step, rl_step, sampled, sampling, train, trained_step, training

from verl_tlt.idle.failure_budget import MAX_FAILURES
from verl_tlt.trainer import controller, waits, watch
from verl_tlt.trainer.waits import CallFailed


def test_hidden_states_that_never_arrive_hold_up_one_rollout_for_their_bound(run, clock, took):
    run_, fleet = run()
    fleet.hand_over = lambda step, taken: {"a": FakeCall(clock)}
    rl_step(run_, fleet, 1)
    assert took(run_.sample_begin, 2) == pytest.approx(waits.SILENT_S)
    run_.sample_end(2, last=True)
    assert fleet.restarts == ["a"] and run_.guard.counts == {"hand-over": 1}
    metrics = rest_of_step(run_, fleet, 2)
    assert metrics["tlt/overhead_hand_over_s"] == pytest.approx(waits.SILENT_S)
    assert metrics["tlt/spot_failures"] == 1
    for step in (3, 4):
        sampled(run_, step)
        metrics = rest_of_step(run_, fleet, step)
    assert metrics["tlt/spot_off_replicas"] == 1, "who fails again and again is left alone"


@pytest.mark.parametrize(("hook", "step", "counted"), [("save", [1], "save"), ("finish", [], "final drafter")])
def test_a_drafter_that_is_never_written_replaces_its_worker(filled, clock, took, hook, step, counted):
    run_, fleet = filled()
    fleet.save = lambda *args: {"a": FakeCall(clock)}
    assert took(getattr(run_, hook), *step) == pytest.approx(controller.SAVE_S)
    run_.saved(1)
    assert fleet.restarts == ["a"] and run_.guard.counts == {counted: 1}


@pytest.mark.parametrize("hook", ["more_prompts", "sample_end"])
def test_a_hook_waits_for_a_look_that_hangs_no_longer_than_its_bound(filled, clock, took, hook):
    run_, fleet = filled(mode="colocate_async" if hook == "more_prompts" else "sync")
    answered = clock.event()
    fleet.try_sleep = lambda name, keep_weights: answered.wait(3600.0)
    phase = contextlib.ExitStack()
    phase.enter_context(sampling(run_, fleet, 2))
    assert took(run_.more_prompts if hook == "more_prompts" else phase.close) == pytest.approx(watch.LOOK_S, abs=1.0)
    answered.set()
    phase.close()
    assert rest_of_step(run_, fleet, 2)["tlt/drafter_version"] == 0
    assert fleet.balancer == {"a", "b"}
    assert run_.guard.counts["recall" if hook == "more_prompts" else "watch"] == 1


def test_a_session_whose_result_does_not_come_is_over_after_its_bound(filled, clock):
    run_, fleet = filled()

    class Announced(FakeCall):
        """It says that it is done, and its result is nowhere."""

        def done(self):
            return True

    fleet.train = lambda name: fleet.calls.append(("train", name)) or Announced(clock)
    with sampling(run_, fleet, 2):
        clock.sleep(watch.ANSWER_S)
        assert [s.error for s in run_._watch.report.sessions] == ["no answer within 1.0 s"]
    assert rest_of_step(run_, fleet, 2)["tlt/spot_failures"] == 1


WAITED_FOR = {
    "rejoin": "rejoin", "engine_stats": "statistics", "take": "tap", "hand_over": "tap", "stage": "publish",
    "keep_as_served": "publish", "disable_drafting": "speculation_control", "drafter_statuses": "rejoin",
    "wake_up": "recall", "save": "save",
}  # fmt: skip
"""The fleet's methods that a step waits for, and the part of the overhead that has their seconds."""
HOOKS = (
    "sample_begin", "more_prompts", "sample_end", "save", "saved", "log_probs_done", "before_sync", "after_sync",
    "validated",
)  # fmt: skip
SLOW_S = 0.25


@pytest.mark.parametrize(("method", "part"), WAITED_FOR.items(), ids=WAITED_FOR)
def test_every_second_that_a_step_waits_is_charged_by_name(filled, took, monkeypatch, method, part):
    run_, fleet = filled(mode="colocate_async" if part == "recall" else "sync")
    run_.metrics(1, {})
    fleet.slow, waited = {method: SLOW_S}, []

    def timed(hook, *args, **named):
        waited.append(took(hook, *args, **named))

    for name in HOOKS:
        monkeypatch.setattr(run_, name, functools.partial(timed, getattr(run_, name)))
    asked = len(fleet.called(method))
    with training(run_, fleet, 2):
        run_.more_prompts()
    run_.save(2)
    run_.saved(2)
    run_.log_probs_done(2)
    merged(run_)
    run_.before_sync(2)
    fleet.sync()
    run_.after_sync(2, colocated_asleep=False)
    run_.validated(2, colocated_asleep=False)
    metrics = run_.metrics(2, {})
    assert len(fleet.called(method)) > asked, "it was not asked"
    assert metrics[f"tlt/overhead_{part}_s"] >= SLOW_S
    assert metrics["tlt/overhead_s"] == pytest.approx(sum(waited))


@pytest.mark.parametrize("phase", ["hand-over", "publish", "save", "merge", "export", "session"])
def test_a_worker_that_is_killed_counts_once_in_whatever_phase(filled, clock, phase):
    run_, fleet = filled()
    dead = CallFailed("RayActorError: gone", died=True)

    def found_dead(*args):
        fleet.waits.answers(phase, {"b": ended(dead)}, waits.SILENT_S)

    match phase:
        case "hand-over":
            run_._arriving = {"b": ended(dead)}
        case "publish":
            fleet.keep_as_served = found_dead
        case "save":
            fleet.save = lambda *args: {"b": ended(dead)}
        case "merge" | "export":
            fleet.merge = found_dead
        case "session":
            fleet.broken["session of b"] = dead
    with sampling(run_, fleet, 2):
        clock.sleep(LOOKS_S)
        assert bool(fleet.restarts) == (phase in ("hand-over", "session")), "as soon as it is found dead"
    run_.save(2)
    run_.saved(2)
    counted = [rest_of_step(run_, fleet, step).get("tlt/spot_failures", 0) for step in (2, 3)]
    assert sum(counted) == 1 and fleet.restarts == ["b"]


def test_who_ends_with_the_run_or_was_replaced_meanwhile_has_not_failed(run, clock, caplog):
    run_, fleet = run()
    replaced = FakeCall(clock)
    replaced.excused = lambda: True
    assert fleet.waits.answers("merge", {"a": replaced}, 1.0) == {}
    run_.finish()
    assert fleet.waits.answers("merge", {"a": FakeCall(clock)}, 1.0) == {}
    assert fleet.restarts == [] and not list(fleet.waits.failures()) and "failed" not in caplog.text


@pytest.mark.parametrize("deaf", [False, True])
def test_a_run_that_fails_while_it_samples_stops_its_sessions_before_it_saves(filled, took, deaf):
    run_, fleet = filled()
    with pytest.raises(ZeroDivisionError), training(run_, fleet, 2):
        fleet.deaf = {"b"} if deaf else set()
        raise ZeroDivisionError
    assert took(run_.finish) == pytest.approx(STOP_S if deaf else 0.0, abs=0.05)
    assert [call[0] for call in fleet.calls if call[0] in ("stop", "save")] == ["stop", "save"]
    assert fleet.on_device == set() and fleet.restarts == ["b"] * deaf
    fleet.load = dict.fromkeys(fleet.replicas, 4)
    fleet.clock.sleep(LOOKS_S)
    fleet.load["a"] = 0
    fleet.clock.sleep(LOOKS_S)
    assert fleet.called("train") == [("b",)] and run_.guard.counts == {}


def test_those_who_fail_together_are_replaced_together(clock):
    """A successor takes over what somebody holds who stays."""
    begin, together = clock.now, []
    own = waits.Waits(lambda names: together.append(list(names)), clock)
    assert own.answers("publish", {"a": FakeCall(clock), "b": ended(1), "c": FakeCall(clock)}, 2.0) == {"b": 1}
    assert together == [["a", "c"]] and clock.now - begin == pytest.approx(2.0), "they share the bound"
    kept = own.answers("save", {"a": ended(CallFailed("No space left on device"))}, 2.0, keep=True)
    assert kept == {} and len(together) == 1 and [f.replaced for f in own.failures()] == [True, True, False]


# ---------------------------------------------------------------------- sessions that fail


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_one_that_does_not_answer_whether_it_sleeps_gets_no_requests_before_the_weight_sync(filled, mode):
    controller, fleet = filled(mode=mode)
    fleet.broken["try_sleep"] = CallFailed("no answer within 30 s", silent=True)
    with sampling(controller, fleet, 2):
        fleet.clock.until(lambda: fleet.called("try_sleep"))
        for _ in range(3):
            fleet.clock.sleep(LOOKS_S)
            controller.more_prompts()
            assert fleet.balancer == {"a"}, "what is sent there may be rejected"
    fleet.broken.clear()
    assert rest_of_step(controller, fleet, 2)["tlt/spot_failures"] == 1 and fleet.called("wake_up") == []
    assert fleet.called("train") == [] and fleet.balancer == {"a", "b"}
    train(controller, fleet, 3)


def test_a_worker_that_never_stops_is_killed_after_the_bound(filled, said):
    controller, fleet = filled("abc")
    fleet.deaf = {"b"}
    with sampling(controller, fleet, 2):
        fleet.load["c"] = 0
        fleet.clock.until(lambda: len(fleet.called("train")) == 2)
        began = fleet.clock.now
    assert fleet.clock.now - began == pytest.approx(STOP_S, abs=0.01)
    assert fleet.restarts == ["b"] and fleet.on_device == set()
    assert f"spot training on b failed: it did not stop within {STOP_S} s" in said.text
    metrics = rest_of_step(controller, fleet, 2)
    assert fleet.called("merge") == [(("c",),)], "what c learned is merged without b"
    assert metrics["tlt/spot_failures"] == 1 and metrics["tlt/drafter_version"] == 1
    assert metrics["tlt/overhead_stop_s"] == pytest.approx(STOP_S, abs=0.01)


def keep_failing(controller, fleet, steps, error="RayTaskError: out of luck"):
    """Steps in each of which `b` is idle, and fails where it may train; returns `tlt/spot_off_replicas` of each."""
    fleet.broken["session of b"], off = CallFailed(error), []
    for step in steps:
        with sampling(controller, fleet, step):
            fleet.clock.sleep(LOOKS_S)
            assert not controller._watch.running
        off.append(rest_of_step(controller, fleet, step)["tlt/spot_off_replicas"])
    return off


def test_a_replica_whose_sessions_keep_failing_is_given_up_and_tried_again(filled, said):
    controller, fleet = filled()
    assert keep_failing(controller, fleet, range(2, 16)) == [0] * 5 + [1] * 9
    assert len(fleet.called("train")) == MAX_FAILURES
    assert said.text.count("spot training on b is given up for 8 steps") == 1
    assert "the last one: RayTaskError: out of luck" in said.text
    assert fleet.restarts == [], "it raised, it did not die"
    assert keep_failing(controller, fleet, [16], "RayTaskError: again")[0] == 1
    assert "spot training on b is given up for 16 steps" in said.text and "RayTaskError: again" in said.text
    fleet.broken.clear()
    for step in range(17, 33):
        rl_step(controller, fleet, step, LOOKS_S)
    assert len(fleet.called("train")) == MAX_FAILURES + 1
    assert trained_step(controller, fleet, 33)["tlt/spot_off_replicas"] == 0
    assert "spot training on b, which was given up, works again" in said.text


@pytest.mark.parametrize("untrained", [True, False])
def test_a_run_for_which_tlt_does_nothing_any_more_says_so_once(filled, said, untrained):
    controller, fleet = filled("bc", standalone="c", start={"untrained": untrained}, cold_start_s=0.0)
    keep_failing(controller, fleet, range(2, 12))
    line = "any more: spot training is given up on every replica, and the drafter is a random one"
    assert said.text.count(line) == said.text.count("TLT does nothing") == untrained
