"""What the whole loop promises, read off a real run (see conftest.py)."""

import json
import os

import pytest
from struck import STRUCK

from benchmarks.faults import judge
from benchmarks.faults.plan import Fault
from benchmarks.faults.run import fired
from benchmarks.resume import held_by, saved
from verl_tlt.commands.report.timeline import rl_steps
from verl_tlt.trainer.controller import COLD_START_STEPS

pytestmark = pytest.mark.e2e


def cold_starts(run):
    return [phase for phase in run.trace.phases if phase.name == "cold_start"]


def test_a_replicas_engine_and_rank_run_on_its_core(run):
    """verl's driver, rollout servers and agent loops run on any core."""
    every = tuple(sorted(os.sched_getaffinity(0)))
    of_replicas = sorted((every[i % len(every)],) for i in range(2))
    assert run.cores_of("Worker") == run.cores_of("WorkerDict") == of_replicas
    for floating in ("TaskRunnerV1", "TLTvLLMHttpServer", "AgentLoopWorkerTQ"):
        assert set(run.cores_of(floating)) == {every}, floating


def test_an_idle_replica_trained_while_the_other_one_decoded(run):
    (cold,) = cold_starts(run)
    sessions = [s for s in run.trace.sessions if s.steps > 0 and not cold.start <= s.start <= cold.end]
    assert sessions, "no spot training happened"
    for s in sessions:
        rollout = rl_steps(run.trace)[s.step]
        assert s.start < rollout.end
        load = max((load for load in run.trace.loads if load.t <= s.start), key=lambda load: load.t)
        assert not load.inflight.get(s.replica), "it was idle"
        assert any(n for name, n in load.inflight.items() if name != s.replica), "the other one decoded"


def test_a_run_without_a_drafter_trains_one_once_before_rl_goes_on(run):
    """How far it comes depends on the machine's pace; where it stands in the step, and what it is charged, do not."""
    (cold,) = cold_starts(run)
    assert cold.step == COLD_START_STEPS + 1
    rolled_out = rl_steps(run.trace)[cold.step].end
    assert rolled_out <= cold.start, "the rollout is over, and its engines sleep"
    (log_probs,) = [p for p in run.trace.phases if p.step == cold.step and p.name == "old_log_prob"]
    assert cold.end <= log_probs.start, "the actor has not begun"
    sessions = [s for s in run.trace.sessions if cold.start <= s.start <= cold.end]
    assert len(sessions) == 2 and max(s.end for s in sessions) <= cold.end
    charged = run.steps[cold.step]["tlt/overhead_cold_start_s"]
    assert cold.end - cold.start <= charged <= 20 + 5, "its bound, and a stop"
    served = {r.version for r in run.trace.reloads if r.step == cold.step}
    assert served == {max([p.version for p in run.trace.publishes if p.step <= cold.step], default=0)}


def test_a_resumed_run_has_no_other_cold_start(resumed):
    assert not cold_starts(resumed) and not any("tlt/overhead_cold_start_s" in m for m in resumed.steps.values())


def test_most_of_the_idle_time_was_used_once_the_buffer_was_worth_it(run):
    later = [m for step, m in run.steps.items() if step >= 3 and m["tlt/idle_s"] > 1.0]
    assert later
    assert sum(m["tlt/trained_s"] for m in later) >= 0.5 * sum(m["tlt/idle_s"] for m in later)


def test_the_published_version_is_the_one_that_is_served(run):
    for metrics in run.steps.values():
        assert metrics["tlt/reload_failures"] == 0.0
    assert all(reload.ok for reload in run.trace.reloads)
    assert len({reload.version for reload in run.trace.reloads}) >= 2, "no trained drafter was loaded"


def test_rollout_and_actor_agree_on_probabilities_under_speculation(run):
    for step, metrics in run.steps.items():
        assert metrics["training/rollout_probs_diff_max"] < 1e-4, step
    assert all(m["tlt/draft_length_frac_2"] > 0.5 for m in run.steps.values()), "nothing was drafted"


def test_acceptance_rose_from_a_random_head(run):
    assert run.steps[1]["tlt/accept_length"] == pytest.approx(1.0, abs=0.15)
    assert run.steps[4]["tlt/accept_length"] > run.steps[1]["tlt/accept_length"] + 0.3


def test_nothing_failed_and_no_response_was_lost(run):
    for metrics in run.steps.values():
        assert metrics.get("tlt/errors", 0.0) == 0.0
        assert metrics["tlt/spot_failures"] == 0.0
        # Forced lengths: one long response and fifteen short ones a step; a lost or truncated one would show.
        assert metrics["response_length/max"] == 600.0
        assert metrics["response_length/min"] == 80.0


def test_stopping_took_less_than_one_micro_batch_and_a_tenth_of_a_second(run):
    (cold,) = cold_starts(run)
    sessions = [s for s in run.trace.sessions if s.steps and not cold.start <= s.start <= cold.end]
    stopped = [s for s in sessions if s.outcome == "stopped"]
    assert stopped
    for s in stopped:
        assert run.steps[s.step]["tlt/overhead_stop_s"] < (s.end - s.start) / s.steps * 2 + 0.1


def test_the_run_leaves_a_drafter_that_loads(run):
    drafter = run.out / "drafter"
    assert {"config.json", "model.safetensors", "provenance.json"} <= {p.name for p in drafter.iterdir()}
    from verl_tlt.drafter import check_drafter

    check_drafter(drafter, run.out.parent / "assets" / "policy-small", 643)
    assert json.loads((drafter / "provenance.json").read_text())["policy_step"] == 4, "the last step's policy"


def test_resume_continues_the_drafter(run, resumed):
    facts = json.loads((run.out / "checkpoints" / "global_step_4" / "tlt_drafter" / "provenance.json").read_text())
    assert facts["version"] >= 1
    assert min(resumed.steps) == 5
    first = min(resumed.trace.reloads, key=lambda r: r.t)
    held = saved(run.out / "checkpoints")
    assert first.version == facts["version"]
    assert held_by(resumed.log)[0] == held.optimizer_steps > 0
    tau = next(p.tau for p in run.trace.publishes if (p.decision, p.version) == ("published", facts["version"]))
    # A fresh random head would be as the run's first one in the first resumed step.
    assert resumed.steps[5]["tlt/accept_length"] > (tau["initial"] + tau["candidate"]) / 2


@pytest.mark.parametrize("fault", STRUCK, ids=lambda fault: fault.name)
def test_a_fault_costs_no_step_and_is_counted_and_named(resumed, fault: Fault):
    struck = fired(resumed.out.parent / "armed")
    seen = judge.Evidence(
        sorted(resumed.steps) == [5, 6, 7], resumed.steps, resumed.steps, resumed.trace, resumed.log, struck, True
    )
    assert set(judge.wrong(fault, judge.row(fault, seen), seen)) <= {"recovered"}
    assert judge.falls_back(fault, seen)


def test_service_recovers_from_the_faults(resumed):
    last = resumed.steps[7]
    assert last["tlt/drafter_off_frac"] == 0.0 and last["tlt/reload_failures"] == 0.0
    assert last["tlt/accept_length"] > 1.25
    assert last["response_length/max"] == 600.0
