"""Whole RL steps with plain objects: what the controller does at verl's hooks, and what failures cost."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
from fakes import KEEPS, PUBLISHES
from rl_steps import LOOKS_S, rest_of_step, rl_step, sampling, training
from step_costs import step_costs

from verl_tlt.commands.report.reader import read_trace
from verl_tlt.messages.rollout import DrafterFile, EngineStats
from verl_tlt.speculation.off import FIRST_WAIT, IN_A_ROW
from verl_tlt.speculation.types import OFF
from verl_tlt.trace.events import TRAINER_DEVICE
from verl_tlt.trainer import watch
from verl_tlt.trainer.controller import WARM_UP_S
from verl_tlt.trainer.servers import Replica, measuring
from verl_tlt.trainer.waits import CallFailed

LATE = CallFailed("no answer within 120 s", late=True)


def trained_step(controller, step, verdict=PUBLISHES):
    """One in whose sampling the drafter is trained, after this verdict. Returns the metrics."""
    with training(controller, step):
        controller.spot.verdict = verdict
    assert controller.spot.session is None, "a guest is on the device when the actor comes"
    return rest_of_step(controller, step)


# ---------------------------------------------------------------------- the good case


def test_an_idle_replica_trains_and_what_it_learned_is_served_after_the_sync(filled):
    controller = filled()
    servers, spot = controller.servers, controller.spot
    assert spot.called("rehearse") == [(WARM_UP_S,)], "what tunes kernels would delay a stop"
    assert spot.called("train") == [], "nothing to train on in the first step"
    with training(controller, 2):
        assert servers.balancer == {"a"} and servers.asleep == {"b": False}
        spot.verdict = PUBLISHES
    metrics = rest_of_step(controller, 2)
    assert spot.called("train") == [("b",)] and spot.called("stop") == spot.called("export") == [()]
    assert servers.staged == [1], "the drafter itself goes from the spot trainer to the servers"
    assert metrics["tlt/drafter_version"] == 1 and metrics["tlt/reload_failures"] == 0
    assert metrics["tlt/errors"] == 0
    assert metrics["tlt/idle_s"] > metrics["tlt/trained_s"] > 0
    assert metrics["tlt/held_out_accept_length_candidate"] == 2.2
    assert metrics["tlt/held_out_accept_length_served"] == 2.0
    assert servers.balancer == {"a", "b"} and controller.served.acceptance == (0.6, 0.6, 0.6)
    written = read_trace(controller.tlt.trace.dir).steps[2]
    assert {name for name in metrics if name.startswith("tlt/")} <= written.keys()


def test_a_drafter_with_which_no_engine_drafts_is_not_sent_to_them(filled):
    controller = filled(enable=False)
    trained_step(controller, 2)
    assert controller.served.version == 1 and controller.servers.called("stage") == []


def test_a_verdict_that_keeps_what_is_served_brings_its_newer_acceptance(filled):
    controller = filled()
    metrics = trained_step(controller, 2, KEEPS)
    assert controller.servers.staged == [] and metrics["tlt/drafter_version"] == 0
    assert controller.served.acceptance == (0.5, 0.4, 0.3)


def test_of_several_verdicts_in_a_step_the_one_that_publishes_is_told(filled):
    controller = filled()
    for verdict in (PUBLISHES, KEEPS):
        with training(controller, 2):
            controller.spot.verdict = verdict
    assert rest_of_step(controller, 2)["tlt/drafter_version"] == 1
    (publish,) = read_trace(controller.tlt.trace.dir).publishes
    assert (publish.decision, publish.version) == ("published", 1)


@pytest.mark.parametrize("late", [True, False])
def test_a_drafter_whose_export_is_late_or_that_cannot_be_handed_over_is_published_a_step_later(filled, late):
    controller = filled()
    controller.spot.late = late
    controller.servers.broken = {} if late else {"stage": LATE}
    metrics = trained_step(controller, 2)
    assert metrics["tlt/drafter_version"] == 0 and controller.guard.counts["publish"] == (not late)
    controller.spot.late = False
    controller.servers.broken.clear()
    metrics = rl_step(controller, 3)
    assert metrics["tlt/drafter_version"] == 1 and metrics["tlt/errors"] == (not late)
    assert [publish.decision for publish in read_trace(controller.tlt.trace.dir).publishes] == ["published"]


def test_a_replica_that_does_not_take_a_drafter_keeps_nobody_else_from_it_and_gets_the_next_one(filled):
    controller = filled()
    servers = controller.servers
    first, other = servers.replicas
    servers.full = {first}
    metrics = trained_step(controller, 2)
    assert servers.loaded == {first: 0, other: 1}
    assert metrics["tlt/errors_publish"] == metrics["tlt/reload_failures"] == 1
    metrics = rl_step(controller, 3)
    assert metrics["tlt/errors_publish"] == metrics["tlt/reload_failures"] == 1
    servers.full = set()
    metrics = trained_step(controller, 4)
    assert set(servers.loaded.values()) == {2} and metrics["tlt/reload_failures"] == 0


def test_a_drafter_that_could_not_be_exported_is_no_publication(filled):
    controller = filled()
    controller.spot.broken["exporting"] = True
    metrics = trained_step(controller, 2)
    assert metrics["tlt/drafter_version"] == 0 and controller.servers.staged == []
    assert metrics["tlt/spot_failures"] == 1
    (publish,) = read_trace(controller.tlt.trace.dir).publishes
    assert publish.decision == "reverted" and "could not be exported" in publish.reason


def test_a_resumed_drafter_has_its_version(run):
    controller = run(start={"served": DrafterFile(7, "{}", b"")})
    controller.servers.loaded = dict.fromkeys(controller.servers.replicas, 7)
    metrics = rl_step(controller, 101)
    assert metrics["tlt/drafter_version"] == 7 and metrics["tlt/reload_failures"] == 0


# ---------------------------------------------------------------------- hidden states


def test_where_hidden_states_cannot_be_captured_nothing_is_trained_and_speculation_goes_on(filled):
    controller = filled(refusal="veomni has no hidden-state capture.")
    assert controller.spot.called("start") == controller.hidden_states.called("take") == []
    assert controller.guard.counts.total() == 0 and controller.spot.off == "veomni has no hidden-state capture."


def test_sequences_that_lack_a_ranks_part_are_counted_once(filled):
    controller = filled()
    controller.spot.left_out = 3
    assert [rl_step(controller, step)["tlt/errors_hidden_states"] for step in (2, 3)] == [3.0, 3.0]


def test_the_first_rollout_chooses_the_tokens_that_are_drafted(filled):
    """Of all ranks' counts together, once; the tie of tokens that nobody said goes to the lowest ids."""
    controller = filled(start={"draft_vocab": 3, "chosen": False})
    assert controller.hidden_states.called("set_up") == [((2, 4, 6), True)]
    assert controller.spot.called("choose_tokens") == [], "nothing was counted"
    controller.hidden_states.token_counts = [np.array([0, 0, 1, 0, 4]), np.array([0, 0, 3, 0, 1])]
    controller.hidden_states.broken["take"] = LATE
    rl_step(controller, 2)
    controller.hidden_states.broken.clear()
    for step in (3, 4):
        rl_step(controller, step)
    ((ids,),) = controller.spot.called("choose_tokens")
    assert ids.tolist() == [0, 2, 4] and controller.guard.counts == {"hidden states": 1}, "asked for until they came"


# ---------------------------------------------------------------------- the cold start


RANDOM = {"facts": {"cold_start_s": 8.0}}
TRAINED = DrafterFile(0, "{}", b"", (0.6, 0.5, 0.4))


def test_a_run_without_a_drafter_stops_once_and_trains_one(filled, took):
    controller = filled(**RANDOM)
    controller.cold_start(2)
    assert controller.spot.called("train") == [], "two steps' hidden states are needed"
    rl_step(controller, 2)
    trained = len(controller.spot.called("train"))
    controller.spot.verdict = PUBLISHES
    assert took(controller.cold_start, 3) == pytest.approx(8.0, abs=0.1)
    assert len(controller.spot.called("train")) == trained + 2, "the second session judges what the first one taught"
    metrics = rest_of_step(controller, 3)
    assert metrics["tlt/overhead_cold_start_s"] == pytest.approx(8.0, abs=0.1)
    assert metrics["tlt/drafter_version"] == 1
    assert took(controller.cold_start, 4) == 0.0, "once"


def test_a_cold_start_ends_when_its_data_is_used_up(filled, took):
    controller = filled(**RANDOM)
    rl_step(controller, 2)
    controller.spot.lasts = 0.5
    assert took(controller.cold_start, 3) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        RANDOM | {"start": {"served": TRAINED}},
        {"facts": {"cold_start_s": 0.0}},
        RANDOM | {"enable": False},
    ],
)
def test_there_is_no_cold_start_where_nobody_needs_one(filled, took, settings):
    controller = filled(**settings)
    rl_step(controller, 2)
    trained = len(controller.spot.called("train"))
    assert took(controller.cold_start, 3) == 0.0 and len(controller.spot.called("train")) == trained


def test_there_is_no_cold_start_where_no_step_was_measured(filled, took):
    controller = filled(**RANDOM)
    controller.servers.costs = step_costs({})
    controller.after_first_sync(0)
    rl_step(controller, 2)
    assert took(controller.cold_start, 3) == 0.0


# ---------------------------------------------------------------------- bounds and failures


def test_a_run_that_fails_while_it_samples_stops_its_session_before_it_saves(filled):
    controller = filled()
    with pytest.raises(ZeroDivisionError), training(controller, 2):
        raise ZeroDivisionError
    controller.finish()
    assert [call[0] for call in controller.spot.calls][-3:] == ["stop", "save", "close"]
    assert controller.servers.called("close") == [()]


@pytest.mark.parametrize("hook", ["more_prompts", "sample_end"])
def test_a_hook_waits_for_a_look_that_hangs_no_longer_than_its_bound(filled, clock, took, hook):
    controller = filled(mode="colocate_async" if hook == "more_prompts" else "sync")
    answered = clock.event()
    controller.servers.try_sleep = lambda name, keep_weights: answered.wait(3600.0)
    phase = contextlib.ExitStack()
    phase.enter_context(sampling(controller, 2))
    hangs = controller.more_prompts if hook == "more_prompts" else phase.close
    assert took(hangs) == pytest.approx(watch.LOOK_S, abs=1.0)
    answered.set()
    phase.close()
    rest_of_step(controller, 2)
    assert controller.servers.balancer == {"a", "b"}
    assert controller.guard.counts["recall" if hook == "more_prompts" else "watch"] == 1


def test_a_replica_that_leaves_only_after_the_phase_is_not_put_to_sleep(filled, clock):
    """It may be about to decode again."""
    controller = filled()
    goes_on, leave = clock.event(), controller.servers.leave
    controller.servers.leave = lambda name: goes_on.wait(3600.0) and leave(name)
    asked = len(controller.servers.called("try_sleep"))
    with sampling(controller, 2):
        pass
    goes_on.set()
    clock.sleep(1.0)
    assert len(controller.servers.called("try_sleep")) == asked and controller.servers.balancer == {"a"}
    rest_of_step(controller, 2)
    assert controller.servers.balancer == {"a", "b"}


def test_a_load_that_is_told_after_the_phase_leads_to_nothing(filled, clock):
    """The trainer's own thread asks the spot trainer by then."""
    controller = filled()
    told, load, asked = clock.event(), controller.servers.inflight, []
    with sampling(controller, 2):
        controller.servers.inflight = lambda: told.wait(3600.0) and load()
        clock.sleep(1.0)
    controller.spot.ready = lambda: asked.append("ready")
    told.set()
    clock.sleep(1.0)
    assert asked == []


@pytest.mark.parametrize(
    ("owner", "method", "kind"),
    [
        ("servers", "inflight", "watch"), ("hidden_states", "take", "hidden states"),
        ("servers", "engine_stats", "end of sampling"), ("servers", "drafter_statuses", "rejoin"),
        ("servers", "disable_drafting", "speculation control"),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_counted_and_the_step_goes_on(run, owner, method, kind):
    controller = run()
    getattr(controller, owner).broken[method] = LATE
    metrics = rl_step(controller, 1)
    assert controller.guard.counts == {kind: 1} and metrics["tlt/errors"] == 1
    assert controller.servers.balancer == {"a", "b"}


def test_a_replica_that_the_balancer_forgot_is_put_back_and_counted(filled):
    controller = filled()
    controller.sample_begin(2)
    controller.servers.load = {"a": 4, "b": 4}
    controller.servers.clock.sleep(LOOKS_S)
    controller.servers.balancer.discard("b")
    controller.servers.clock.sleep(LOOKS_S)
    assert controller.servers.balancer == {"a", "b"}
    controller.sample_end(2, last=True)
    assert controller.servers.called("leave") == [] and controller.guard.counts == {"lost replica": 1}
    loads = read_trace(controller.log.trace.path.parent).loads
    assert {"a"} in [load.inflight.keys() for load in loads if load.step == 2], "the trace shows when it was gone"


def test_lines_that_the_trace_loses_are_counted(filled, tmp_path):
    (tmp_path / "trace").write_text("a file, where the trace's directory would be")
    controller = filled()
    lost = rl_step(controller, 2, LOOKS_S)["tlt/errors_trace"]
    assert rl_step(controller, 3, LOOKS_S)["tlt/errors_trace"] > lost > 1


WAITED_FOR = {
    ("servers", "rejoin"): "rejoin", ("servers", "engine_stats"): "statistics", ("servers", "stage"): "publish",
    ("servers", "disable_drafting"): "speculation_control", ("hidden_states", "take"): "hidden_states",
    ("servers", "drafter_statuses"): "rejoin", ("servers", "wake_up"): "recall", ("spot", "save"): "save",
    ("spot", "on_its_node"): "save",
}  # fmt: skip
"""What a step waits for, and the part of the overhead that has its seconds."""
HOOKS = (
    "sample_begin", "more_prompts", "sample_end", "save", "saved", "log_probs_done", "before_sync", "after_sync",
    "validated",
)  # fmt: skip
SLOW_S = 0.25


@pytest.mark.parametrize(("call", "part"), WAITED_FOR.items(), ids=lambda value: "-".join(value))
def test_every_second_that_a_step_waits_is_charged_by_name(filled, took, monkeypatch, call, part):
    controller = filled(mode="colocate_async" if part == "recall" else "sync")
    controller.metrics(1, {})
    owner, method = getattr(controller, call[0]), call[1]
    owner.slow, waited = {method: SLOW_S}, []

    def timed(hook, *args, **named):
        waited.append(took(hook, *args, **named))

    for name in HOOKS:
        monkeypatch.setattr(controller, name, functools.partial(timed, getattr(controller, name)))
    asked = len(owner.called(method))
    with training(controller, 2):
        controller.spot.verdict = PUBLISHES
        controller.more_prompts()
    controller.save(2)
    controller.saved(2)
    controller.validated(1, colocated_asleep=False)
    metrics = rest_of_step(controller, 2)
    assert len(owner.called(method)) > asked, "it was not asked"
    assert metrics[f"tlt/overhead_{part}_s"] >= SLOW_S
    assert metrics["tlt/overhead_s"] == pytest.approx(sum(waited))


def test_a_run_whose_drafter_is_not_trained_any_more_captures_nothing_and_keeps_its_drafter(filled, tmp_path):
    controller = filled()
    controller.spot.off = "the spot trainer failed 3 times in a row"
    for step in (2, 3):
        assert rl_step(controller, step)["tlt/spot_off"] == 1.0
    assert controller.spot.called("train") == []
    assert controller.hidden_states.called("stop") == [()], "nobody needs hidden states any more"
    controller.finish()
    assert controller.spot.saved[-1][0] == tmp_path / "drafter", "it is written all the same"


# ---------------------------------------------------------------------- asynchronous modes


def test_whoever_left_is_called_back_before_more_prompts_are_sent(filled):
    controller = filled(mode="colocate_async")
    servers = controller.servers
    with training(controller, 2):
        assert servers.asleep == {"b": True}, "it keeps its weights"
        controller.more_prompts()
        assert servers.balancer == {"a", "b"} and servers.asleep == {}
        assert servers.called("wake_up") == [("b",)] and controller.spot.called("stop") == [()]
    assert controller.guard.counts.total() == 0


def test_what_two_sessions_of_a_step_would_publish_is_exported_once(filled):
    controller = filled(mode="colocate_async")
    with training(controller, 2):
        controller.spot.verdict = PUBLISHES
        controller.more_prompts()
        controller.servers.load |= {"a": 0, "b": 4}
        controller.servers.clock.sleep(LOOKS_S)
        controller.spot.verdict = PUBLISHES
    assert controller.spot.called("train") == [("b",), ("a",)] and controller.spot.called("export") == [()]
    assert rest_of_step(controller, 2)["tlt/drafter_version"] == 1


@pytest.mark.parametrize("broken", ["try_sleep", "wake_up"])
def test_one_that_neither_sleeps_nor_serves_for_certain_gets_no_requests_before_the_weight_sync(filled, broken):
    controller = filled(mode="colocate_async")
    servers, slept = controller.servers, broken == "wake_up"
    servers.broken[broken] = LATE
    with sampling(controller, 2):
        assert servers.called("try_sleep")
        for _ in range(3):
            controller.more_prompts()
            servers.clock.sleep(LOOKS_S)
            assert servers.balancer == {"a"}, "what is sent there may be rejected"
    assert servers.balancer == {"a", "b"}, "verl sends again what it aborts"
    servers.broken.clear()
    assert rest_of_step(controller, 2)["tlt/errors_leaving"] == 1
    assert len(servers.called("wake_up")) == len(controller.spot.called("train")) == slept, "it is not asked again"
    trained_step(controller, 3)


@pytest.mark.parametrize("colocated", ["ab", ""])
def test_where_rollout_has_its_own_devices_the_trainers_train_while_it_waits(run, colocated):
    """Whether replicas share them or not (`actor_rollout_ref.hybrid_engine=False`)."""
    controller = run([*colocated, "far"], mode="separate_async", standalone={"far"})
    assert controller.speculation.replicas[0] == "far", "what replicas measure that sleep nobody learns"
    controller.log_probs_done(0)
    controller.servers.balancer = {"far"}
    for last in (False, True):  # two samplings of one step
        controller.sample_begin(1)
        controller.servers.load["far"] = 4
        controller.servers.clock.sleep(LOOKS_S)
        controller.more_prompts()
        assert controller.spot.session == (colocated[0] if colocated else f"{TRAINER_DEVICE} 0"), "it goes on"
        controller.spot.verdict = PUBLISHES if last else None
        controller.sample_end(1, last=last)
    assert len(controller.spot.called("train")) == 2 and controller.servers.called("leave") == []
    assert len(controller.hidden_states.called("release")) == 2, "the actor held GPU memory that it did not use"
    assert controller.servers.balancer == {"far"}, "verl has taken the others out"
    controller.before_sync(1)
    controller.servers.loaded["far"] = 1
    controller.after_sync(1, colocated_asleep=True)
    metrics = controller.metrics(1, {})
    assert metrics["tlt/drafter_version"] == 1, "those that sleep are not asked"
    assert metrics["tlt/reload_failures"] == metrics["tlt/errors"] == 0


# ---------------------------------------------------------------------- checkpoints


def test_the_drafter_is_written_beside_the_policy_and_at_the_runs_end(filled, tmp_path):
    controller = filled(facts={"keeps": 3})
    controller.save(1)
    step = tmp_path / "ckpt" / "global_step_1"
    assert [save[0] for save in controller.spot.saved] == [step / "tlt_drafter"]
    controller.save(2)
    controller.save(3)
    rotates = [save[3] for save in controller.spot.saved]
    assert controller.spot.saved[0][2] == step and rotates == [False, False, True], "what a disk's room is judged by"
    trained_step(controller, 2)
    controller.finish()
    directory, provenance, *_ = controller.spot.saved[-1]
    assert directory == tmp_path / "drafter"
    assert (provenance.version, provenance.policy_step, provenance.tokens_trained) == (1, 2, 5000)
    assert tuple(provenance.acceptance) == (0.6, 0.6, 0.6)


def test_the_end_of_a_run_that_published_nothing_leaves_an_earlier_runs_drafter_alone(filled, tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").touch()
    for start, saves in (({}, 0), ({"checkpoint": tmp_path / "global_step_9" / "tlt_drafter"}, 1)):
        for trained in (False, True):
            controller = filled(start=start)
            if trained:
                trained_step(controller, 2, KEEPS)
            controller.finish()
            assert len(controller.spot.saved) == saves and controller.guard.counts.total() == 0


def test_a_checkpoint_on_another_nodes_disk_is_told(run, said, tmp_path):
    controller = run()
    controller.save(1)
    assert "trainer.default_local_dir" in said.text
    step = tmp_path / "ckpt" / "global_step_2" / "tlt_drafter"
    step.mkdir(parents=True)
    (step / "config.json").touch()
    controller.save(2)
    assert said.text.count("trainer.default_local_dir") == 1


def test_a_final_drafter_on_another_nodes_disk_is_told(run, said, tmp_path):
    run().finish()
    assert f"{tmp_path / 'drafter'} on the disk of another node" in said.text and "Ray's id far-node" in said.text
    said.clear()
    controller = run()
    save = controller.spot.save

    def here(directory, *args):
        save(directory, *args)
        directory.mkdir()
        (directory / "config.json").touch()

    controller.spot.save = here
    controller.finish()
    assert controller.spot.saved and not said.records and controller.guard.counts.total() == 0


def test_a_checkpoint_that_fails_does_not_fail_the_policys(run):
    controller = run()
    controller.spot.broken["save"] = CallFailed("No space left on device")
    controller.save(1)
    controller.saved(1)
    controller.finish()
    assert controller.guard.counts == {"save": 1, "final drafter": 1}


# ---------------------------------------------------------------------- who drafts


def test_a_drafter_that_a_validation_did_not_load_again_is_counted(filled):
    """With a reward model on the same GPUs verl syncs weights in validations, too."""
    controller = filled()
    controller.after_sync(2, colocated_asleep=False)
    controller.servers.loaded["a"] = 7
    controller.validated(2, colocated_asleep=False)
    assert controller.metrics(2, {})["tlt/reload_failures"] == 1


def test_validation_is_not_the_next_rollouts(filled):
    controller = filled()
    asked = len(controller.servers.called("engine_stats"))
    controller.validated(1, colocated_asleep=False)
    assert len(controller.servers.called("engine_stats")) == asked + 1


def test_the_trace_has_a_load_a_second_and_those_at_which_a_replica_turns_idle(filled):
    controller = filled()
    clock, servers = controller.servers.clock, controller.servers
    controller.sample_begin(2)
    for requests in range(40, 10, -1):
        servers.load = {"a": requests, "b": requests}
        clock.sleep(watch.POLL_S)
    servers.load = {"a": 4, "b": 0}
    clock.sleep(2 * watch.POLL_S)
    controller.sample_end(2, last=True)
    *steady, last = [load for load in read_trace(controller.log.trace.path.parent).loads if load.step == 2]
    assert last.inflight == {"a": 4, "b": 0} and 3 <= len(steady) <= 4
    assert all(b.t - a.t >= watch.LOAD_S for a, b in itertools.pairwise(steady))


def test_loads_of_many_replicas_are_written_more_rarely(run):
    many = [f"replica-{i}" for i in range(64)]
    controller = run(many)
    clock, servers = controller.servers.clock, controller.servers
    controller.sample_begin(2)
    for busy in range(64, 4, -1):  # in every look another one becomes idle
        servers.load = {name: int(i < busy) for i, name in enumerate(many)}
        clock.sleep(watch.POLL_S)
    controller.sample_end(2, last=True)
    loads = [load for load in read_trace(controller.log.trace.path.parent).loads if load.step == 2]
    assert 1 <= len(loads) <= 2 and all(b.t - a.t >= 4 * watch.LOAD_S for a, b in itertools.pairwise(loads))


@pytest.mark.parametrize(("at_once", "off"), [(None, {"a", "b"}), (3, set())])
def test_the_first_rollout_is_judged_by_batches_that_a_replica_can_have(run, at_once, off):
    """Of three requests a replica has two at most; with 32 drafts would cost more than they give."""
    controller = run(start={"served": TRAINED}, facts={"requests_at_once": at_once})
    controller.servers.costs = step_costs(
        {OFF: [(1, 0.01), (2, 0.01), (32, 0.01)], 3: [(1, 0.011), (2, 0.011), (32, 0.06)]}
    )
    controller.after_first_sync(0)
    assert controller.servers.disabled == off


@pytest.mark.parametrize(("method", "off"), [("calibrate", True), ("tell_costs", False)])
def test_without_step_times_nothing_is_drafted_and_others_draft_if_one_does_not_hear_of_them(run, method, off):
    controller = run()
    controller.servers.broken[method] = LATE
    controller.after_first_sync(0)
    assert controller.guard.counts == {"calibration": 1}
    assert controller.servers.disabled == ({"a", "b"} if off else set())


@pytest.mark.parametrize(("costs", "saved_s"), [({OFF: [(4, 0.01)], 3: [(4, 0.011)]}, 1.5), ({}, None)])
def test_savings_are_told_where_step_times_are_known(run, costs, saved_s):
    controller = run(policy="fixed")
    controller.servers.costs = step_costs(costs)
    controller.after_first_sync(0)
    controller.servers.stats = dict.fromkeys("ab", EngineStats(
        num_steps=10, num_drafts=10, steps_by_draft_length={3: 10}, decode_s=1.0, undrafted_s=2.5
    ))  # fmt: skip
    assert rl_step(controller, 1).get("tlt/saved_estimate_s") == saved_s


@pytest.mark.parametrize(("policy", "times"), [("live_table", 1), ("fixed", 0)])
def test_that_no_draft_was_measured_is_said_once(run, said, policy, times):
    controller = run(policy=policy)
    controller.servers.costs = step_costs({OFF: [(4, 0.01)], 0: [(4, 0.011)]})
    controller.after_first_sync(0)
    for step in (1, 2, 3):
        assert controller.servers.disabled == (set() if policy == "fixed" else {"a", "b"})
        rl_step(controller, step)
    assert said.text.count("no step with a draft") == times
    assert list(read_trace(controller.tlt.trace.dir).off) == ([] if policy == "fixed" else [1, 2, 3])


def test_drafting_is_switched_off_where_it_loses_and_one_replica_tries_again(run, said):
    controller = run(start={"served": DrafterFile(0, "{}", b"")})
    servers, steps = controller.servers, itertools.count(1)
    servers.costs = step_costs({OFF: [(1, 0.01)], 3: [(1, 0.01)]})
    controller.after_first_sync(0)
    servers.stats = dict.fromkeys("ab", EngineStats(
        num_drafts=1000, steps_by_draft_length={3: 100}, decode_s=2.0, undrafted_s=1.0
    ))  # fmt: skip
    for _ in range(IN_A_ROW):
        assert servers.disabled == set()
        metrics = rl_step(controller, next(steps))
        assert metrics["tlt/saved_estimate_s"] == -1.0
    assert metrics["tlt/speculation_disabled"] == 1.0 and said.text.count("Drafting is switched off") == 1
    servers.stats = {}
    for _ in range(FIRST_WAIT):
        assert servers.disabled == {"a", "b"}
        rl_step(controller, next(steps))
    assert servers.disabled == {"b"}
    rl_step(controller, last := next(steps))
    off = read_trace(controller.tlt.trace.dir).off
    assert list(off) == list(range(last - FIRST_WAIT, last)) and set(off.values()) == {controller.speculation.cause}


def test_step_times_are_measured_where_rollouts_are_decoded():
    """In `separate_async` colocated replicas come first, and lend their devices to the actor."""
    replicas = {name: Replica(name, ranks, None, []) for name, ranks in (("a", [0]), ("b", []), ("c", []))}
    assert measuring(replicas).name == "b" and measuring({"a": replicas["a"]}).name == "a"
