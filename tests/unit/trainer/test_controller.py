"""Whole RL steps with a fleet of plain objects: what the controller does at verl's hooks, and what failures cost."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rl_steps import LOOKS_S, merged, rest_of_step, rl_step, sampled, sampling, train, trained_step, training

from verl_tlt.commands.report.reader import read_trace
from verl_tlt.config import TOKENS_PER_STEP
from verl_tlt.messages.rollout import EngineStats, LoadInterval
from verl_tlt.messages.training import SessionResult
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF
from verl_tlt.trace.events import TRAINER_DEVICE
from verl_tlt.trainer.waits import CallFailed

EXHAUSTED = SessionResult("exhausted", steps=20, tokens=5000, epochs=3.0)
LATE = CallFailed("no answer within 120 s")


def test_an_idle_replica_trains_and_what_it_learned_is_served_after_the_sync(filled):
    controller, fleet = filled()
    assert fleet.called("train") == [], "nothing to train on in the first step"
    with training(controller, fleet, 2):
        assert fleet.balancer == {"a"} and fleet.asleep == {"b": False}
    metrics = rest_of_step(controller, fleet, 2)
    assert fleet.called("train") == fleet.called("stop") == [("b",)] and fleet.called("merge") == [(("b",),)]
    assert [d.version for d in fleet.staged] == [1] and fleet.called("keep_as_served") == [()]
    assert metrics["tlt/drafter_version"] == metrics["tlt/drafter_version_published"] == 1
    assert metrics["tlt/drafter_staleness"] == 0
    assert metrics["tlt/bubble_s"] > 0 and metrics["tlt/errors"] == 0
    assert fleet.balancer == {"a", "b"}
    assert fleet.staged[0].acceptance == pytest.approx((0.6,) * 3, abs=0.01)


def test_a_resumed_drafter_has_its_version_and_is_served_since_the_resumption(run):
    controller, fleet = run(enable=False)
    controller.updates.served = replace(controller.updates.served, version=7)
    controller.after_first_sync(100)
    metrics = rl_step(controller, fleet, 101)
    assert (metrics["tlt/drafter_version_published"], metrics["tlt/drafter_staleness"]) == (7, 1)


# ---------------------------------------------------------------------- hidden states


@pytest.mark.parametrize(("take_s", "factors"), [(0.0, [1, 2, 2]), (1.0, [1, 2, 1])])
def test_a_session_that_ran_out_of_data_gets_more_of_the_next_step_unless_the_tap_takes_long(filled, take_s, factors):
    """In a step of some seconds; what the object store takes for it is part of the tap's limit."""
    controller, fleet = filled()
    fleet.slow["take"] = take_s
    for step in (2, 3):
        with training(controller, fleet, step):
            if step == 2 or take_s:  # else the session lasts as long as its bubble
                fleet.sessions["b"].end(EXHAUSTED)
            fleet.clock.sleep(1.5)
        metrics = rest_of_step(controller, fleet, step)
    assert fleet.tap_tokens == [n * TOKENS_PER_STEP for n in factors]
    assert metrics["tlt/tap_tokens"] == fleet.tap_tokens[-1]
    written = read_trace(controller.tlt.trace.dir).steps[3]
    assert {n for n in metrics if n.startswith("tlt/")} <= written.keys(), "the trace has what verl's logger has"


def test_several_samplings_of_one_step_are_merged_once_and_double_the_captured_tokens_once(run):
    controller, fleet = run(["a", "far"], mode="separate_async", standalone={"far"})
    controller.log_probs_done(0)
    for last in (False, True):
        controller.sample_begin(1)
        fleet.clock.until(lambda: controller._watch.running)
        fleet.sessions["a"].end(EXHAUSTED)
        fleet.clock.sleep(1.5)
        controller.sample_end(1, last=last)
        assert (controller.updates.under_way is not None) is last
        controller.log_probs_done(1)
    merged(controller)
    assert fleet.called("merge") == [(("a",),)] and len(fleet.called("train")) == 2
    assert fleet.tap_tokens == [TOKENS_PER_STEP, TOKENS_PER_STEP, 2 * TOKENS_PER_STEP]


def test_one_that_is_replaced_trains_when_it_has_been_given_something(filled):
    controller, fleet = filled()
    train(controller, fleet, 2)
    give = fleet.hand_over
    fleet.hand_over = lambda step, taken: {"a": give(step, taken)["a"]}
    rest_of_step(controller, fleet, 2)
    with sampling(controller, fleet, 3):
        assert len(fleet.called("train")) == 1
    fleet.hand_over = give
    rest_of_step(controller, fleet, 3)
    train(controller, fleet, 4)


def test_without_a_tap_nothing_is_trained_and_speculation_goes_on(filled):
    controller, fleet = filled(of_fleet={"untapped": "veomni has no hidden-state tap."})
    assert not controller.spot and fleet.called("take") == []
    assert controller.guard.counts.total() == 0


def test_the_first_rollout_chooses_the_tokens_that_are_drafted(filled):
    """Of all ranks' counts together, once; the tie of tokens that nobody said goes to the lowest ids."""
    controller, fleet = filled(start={"draft_vocab": 3, "chosen": False})
    assert fleet.called("start_spot") == [((2, 4, 6), None, True)]
    assert fleet.called("choose_tokens") == [], "nothing was counted"
    fleet.token_counts = [np.array([0, 0, 1, 0, 4]), np.array([0, 0, 3, 0, 1])]
    for step in (2, 3):
        rl_step(controller, fleet, step)
    ((ids,),) = fleet.called("choose_tokens")
    assert ids.tolist() == [0, 2, 4] and controller.guard.counts == {}


def test_a_weight_sync_is_copied_from_only_when_the_drafter_will_be_trained(filled):
    controller, fleet = filled()
    assert fleet.called("take") == [(True,)], "the first session needs them"

    def copies(step, bubble):
        (train if bubble else lambda controller, fleet, step: sampled(controller, step))(controller, fleet, step)
        rest_of_step(controller, fleet, step)
        return fleet.called("take")[-1] == (True,)

    assert copies(2, bubble=True)
    assert not copies(3, bubble=False), "workers were ready, and there was no bubble"
    assert copies(4, bubble=True)


# ---------------------------------------------------------------------- merges and publications


def test_a_late_merge_keeps_the_served_drafter_and_is_published_a_step_later(filled):
    controller, fleet = filled()
    fleet.merge_gate.clear()
    train(controller, fleet, 2)
    metrics = rest_of_step(controller, fleet, 2, wait=False)
    assert fleet.staged == [] and metrics["tlt/drafter_version"] == 0
    with sampling(controller, fleet, 3):
        fleet.clock.sleep(0.1)
    assert fleet.called("train") == [("b",)], "the weights that are being merged are not trained meanwhile"
    fleet.merge_gate.set()
    assert rest_of_step(controller, fleet, 3)["tlt/drafter_version"] == 1
    train(controller, fleet, 4)


@pytest.mark.parametrize(("acceptance", "overflows"), [(0.4, False), (0.6, True)])
def test_a_candidate_that_is_worse_or_no_engine_would_take_is_not_served(filled, acceptance, overflows):
    controller, fleet = filled()
    fleet.candidate_acceptance, fleet.overflows = acceptance, overflows
    metrics = trained_step(controller, fleet, 2)
    assert fleet.staged == [] and fleet.called("revert") == [("served",)]
    assert metrics["tlt/drafter_version"] == 0 and metrics["tlt/publish_skipped"] == 1 and metrics["tlt/errors"] == 0


@pytest.mark.parametrize(("method", "versions"), [("stage", [0, 1]), ("export", [0, 1]), ("merge", [1, 1, 2])])
def test_a_publication_or_merge_that_fails_costs_itself_and_nothing_else(filled, method, versions):
    """Without its merge an update publishes what it exported; what the next step merges is judged a step later."""
    controller, fleet = filled()
    fleet.broken[method] = LATE
    for step, version in enumerate(versions, 2):
        assert trained_step(controller, fleet, step)["tlt/drafter_version"] == version
        assert fleet.called("merge")[-1] == (("b",),) and controller.guard.counts == {"publish": 1}
        assert controller.updates.served.acceptance == pytest.approx((0.6,) * 3, abs=0.01) or not version
        fleet.broken.clear()


def test_an_update_that_cannot_begin_costs_itself(filled, monkeypatch):
    controller, fleet = filled()

    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert trained_step(controller, fleet, 2)["tlt/errors_end_of_sampling"] == 1


# ---------------------------------------------------------------------- calls that fail


def test_lines_that_the_trace_loses_are_counted(filled, tmp_path):
    (tmp_path / "trace").write_text("a file, where the trace's directory would be")
    controller, fleet = filled()
    lost = rl_step(controller, fleet, 2, LOOKS_S)["tlt/errors_trace"]
    assert rl_step(controller, fleet, 3, LOOKS_S)["tlt/errors_trace"] > lost > 1


@pytest.mark.parametrize(
    ("method", "kind"),
    [("take", "tap"), ("hand_over", "tap"), ("engine_stats", "end of sampling"), ("drafter_statuses", "rejoin"),
     ("disable_drafting", "speculation control")],
)  # fmt: skip
def test_a_call_that_fails_is_counted_and_the_step_goes_on(run, method, kind):
    controller, fleet = run()
    fleet.broken[method] = LATE
    metrics = rl_step(controller, fleet, 1)
    assert controller.guard.counts == {kind: 1} and metrics["tlt/errors"] == 1
    assert fleet.balancer == {"a", "b"}


def test_a_balancer_that_fails_ends_the_watch_and_not_the_phase(run):
    controller, fleet = run()
    controller.sample_begin(1)
    fleet.broken["inflight"] = CallFailed("gone")
    fleet.clock.until(lambda: controller._watch.report.error)
    controller.sample_end(1, last=True)
    assert controller._watch is None and controller.guard.counts == {"watch": 1}


def test_a_replica_that_the_balancer_forgot_is_put_back_and_counted(filled):
    controller, fleet = filled()
    controller.sample_begin(2)
    fleet.load = {"a": 4, "b": 4}
    fleet.clock.sleep(LOOKS_S)
    fleet.balancer.discard("b")
    fleet.clock.until(lambda: fleet.balancer == {"a", "b"})
    controller.sample_end(2, last=True)
    assert fleet.called("leave") == [] and controller.guard.counts == {"lost replica": 1}
    assert rest_of_step(controller, fleet, 2)["tlt/errors_lost_replica"] == 1


# ---------------------------------------------------------------------- asynchronous modes


def test_whoever_left_is_called_back_before_more_prompts_are_sent(filled):
    controller, fleet = filled(mode="colocate_async")
    with training(controller, fleet, 2):
        assert fleet.asleep == {"b": True}, "it keeps its weights"
        controller.more_prompts()
        assert fleet.balancer == {"a", "b"} and fleet.asleep == {}
        assert fleet.called("stop") == fleet.called("wake_up") == [("b",)]
    assert controller.guard.counts.total() == 0
    assert rest_of_step(controller, fleet, 2)["tlt/drafter_version"] == 1


@pytest.mark.parametrize(("colocated", "trained"), [("ab", {"a", "b"}), ("", {f"{TRAINER_DEVICE} 0"})])
def test_where_rollout_has_its_own_devices_the_trainers_train_while_it_waits(run, colocated, trained):
    """Whether replicas share them or not (`actor_rollout_ref.hybrid_engine=False`)."""
    controller, fleet = run([*colocated, "far"], mode="separate_async", standalone={"far"})
    controller.log_probs_done(0)
    controller.sample_begin(1)
    fleet.clock.until(lambda: len(fleet.called("train")) == len(trained))
    controller.sample_end(1, last=True)
    assert {name for (name,) in fleet.called("stop")} == trained and fleet.called("leave") == []
    merged(controller)
    controller.before_sync(1)
    fleet.loaded["far"] = 1
    controller.after_sync(1, colocated_asleep=True)
    metrics = controller.metrics(1, {})
    assert metrics["tlt/drafter_version"] == 1, "those that sleep are not asked"
    assert metrics["tlt/reload_failures"] == 0


@pytest.mark.parametrize("colocated", ["ab", ""])
def test_replicas_on_the_trainers_devices_get_no_requests_although_nobody_trains_there(run, clock, colocated):
    """verl has taken them out of the balancer: they sleep, and reject what they are sent."""
    names, no_tap = [*colocated, "far"], {"untapped": "it has no tap"}
    controller, fleet = run(names, mode="separate_async", standalone={"far"}, of_fleet=no_tap)
    fleet.balancer = {"far"}
    controller.sample_begin(1)
    fleet.load["far"] = 4
    clock.sleep(LOOKS_S)
    assert fleet.balancer == {"far"}
    controller.sample_end(1, last=True)
    metrics = rest_of_step(controller, fleet, 1)
    assert metrics["tlt/errors"] == 0
    assert metrics.get("tlt/bubble_s", 0.0) == pytest.approx((len(colocated) or 1) * LOOKS_S), "of the wait for samples"


@pytest.mark.parametrize(("mode", "seconds"), [("sync", 1.0), ("colocate_async", 1.0), ("separate_async", 2.0)])
def test_tokens_a_second_are_of_the_time_in_which_engines_decode(run, mode, seconds):
    controller, fleet = run("abc", mode=mode, standalone="c" if mode == "separate_async" else "")
    fleet.stats = {"c": EngineStats(num_steps=4, num_generation_tokens=60)}
    assert rl_step(controller, fleet, 1)["tlt/rollout_tok_per_s"] == pytest.approx(60 / seconds)


# ---------------------------------------------------------------------- checkpoints


def test_the_drafter_is_written_beside_the_policy_and_at_the_runs_end(filled, tmp_path):
    controller, fleet = filled()
    controller.save(1)
    assert [directory for directory, _ in fleet.saved] == [tmp_path / "ckpt" / "global_step_1" / "tlt_drafter"]
    trained_step(controller, fleet, 2)
    controller.finish()
    assert fleet.called("close") == [()]
    directory, provenance = fleet.saved[-1]
    assert directory == tmp_path / "drafter"
    assert (provenance.version, provenance.policy_step, provenance.tokens_trained) == (1, 2, 5000)
    assert tuple(provenance.acceptance) == fleet.staged[0].acceptance


@pytest.mark.parametrize("method", ["save", "writing"])
def test_a_checkpoint_that_fails_does_not_fail_the_policys(run, method):
    controller, fleet = run()
    fleet.broken[method] = CallFailed("No space left on device")
    controller.save(1)
    controller.saved(1)
    controller.finish()
    assert controller.guard.counts == {"save": 1, "final drafter": 1}


def test_a_resumed_run_continues_the_workers(run):
    _, fleet = run(start={"checkpoint": Path("somewhere")})
    assert fleet.called("start_spot") == [((2, 4, 6), Path("somewhere"), False)]


# ---------------------------------------------------------------------- who drafts, and what it saved


@pytest.mark.parametrize("shared", [True, False])
def test_a_control_rollout_is_decoded_without_drafts(run, shared):
    """On a shared machine by all replicas, and nobody trains beside it."""
    controller, fleet = run(control_every=2, shared=shared, policy="fixed")
    fleet.stats = {"a": EngineStats(num_steps=1)}
    for step in 1, 2, 3, 4:
        controlled, trained = step % 2 == 0, len(fleet.called("train"))
        assert len(fleet.disabled) == (0 if not controlled else 2 if shared else 1)
        with sampling(controller, fleet, step):
            fleet.clock.sleep(LOOKS_S)
        assert (len(fleet.called("train")) > trained) == (step > 1 and not (controlled and shared))
        assert rest_of_step(controller, fleet, step)["tlt/speculation_disabled"] == 0.0


def test_one_that_decodes_is_the_first_to_decode_without_drafts_or_to_try_them(run):
    """Replicas on the trainer's devices sleep: what they try or measure nobody learns."""
    names, rule = ["a", "b", "far"], {"policy": "fixed", "control_every": 1}
    controller, fleet = run(names, mode="separate_async", standalone={"far"}, **rule)
    controller.before_sync(2)  # of three replicas it is the first one's turn in every third rollout
    assert fleet.disabled == {"far"}


def test_step_costs_that_servers_found_are_used(run):
    costs = LatencyTable.calibrated({k: [(1, 0.01), (8, 0.01)] for k in (OFF, 0, 1, 2, 3)})
    assert run(of_fleet={"costs": costs})[0].speculation.saving((0.9, 0.9, 0.9)) > 0.5


def test_a_rollout_without_drafts_saved_exactly_nothing_whatever_trained_beside_it(filled):
    """A step without drafts takes 10 ms; beside another replica's training it took 20."""
    costs = LatencyTable.calibrated({OFF: [(1, 0.01), (8, 0.01)]})
    controller, fleet = filled(shared=True, of_fleet={"costs": costs})
    with training(controller, fleet, 2):
        fleet.sessions["b"].end(EXHAUSTED)
        fleet.clock.until(lambda: controller._watch.report.sessions)
        trained = controller._watch.report.sessions[0]
        slowed = LoadInterval(trained.start, trained.end, 4.0, 50.0, seconds=1.0, plain_steps=50.0, off=True)
        fleet.stats = {"a": EngineStats(load_intervals=(slowed,))}
    assert rest_of_step(controller, fleet, 2)["tlt/saved_s"] == 0.0
    with training(controller, fleet, 3):
        drafted = slowed._replace(start=trained.end, end=trained.end + 1.0, off=False)
        fleet.stats = {"a": EngineStats(load_intervals=(drafted,), num_drafts=1)}
    assert rest_of_step(controller, fleet, 3)["tlt/saved_s"] == pytest.approx(-0.5), "drafted, it is charged"


def test_validation_is_not_the_next_rollouts(filled):
    controller, fleet = filled()
    asked = len(fleet.called("engine_stats"))
    controller.validated(1, colocated_asleep=False)
    assert len(fleet.called("engine_stats")) == asked + 1
