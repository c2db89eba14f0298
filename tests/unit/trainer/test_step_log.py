"""What a step's log holds, without a trainer."""

import dataclasses
import io

import pytest

from verl_tlt.idle.planner import IdleTime
from verl_tlt.messages.rollout import DrafterStatus, EngineStats
from verl_tlt.messages.training import CapturedStates
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.watch import PhaseReport

STATS = EngineStats(
    num_steps=4, num_decode_tokens=6, num_drafts=4,
    num_draft_tokens_per_pos=(4,), num_accepted_tokens_per_pos=(2,), steps_by_draft_length={1: 4},
)  # fmt: skip


@pytest.fixture
def log(tmp_path):
    return StepLog(TraceWriter(tmp_path, "trainer"))


def test_statistics_that_could_not_be_had_are_counted_and_the_others_kept(log):
    answers = {
        "whole": STATS,
        "failed": EngineStats(failure="ZeroDivisionError: division by zero"),
        "silent": EngineStats(failure="the channel is closed"),
        "speculation off": EngineStats(),
    }
    assert log.engine_stats(answers) == 2
    log.guard.count("hidden states", 2)
    metrics = log.finish(1, {})
    assert metrics["tlt/errors"] == 2.0
    assert metrics["tlt/accept_length"] == 1.5


def test_a_line_that_cannot_be_printed_is_counted_and_costs_no_metric(log, monkeypatch):
    log.spot_trainer_failed()
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
    assert log.finish(1, {})["tlt/spot_failures"] == 1.0
    later = log.finish(2, {})
    assert later["tlt/errors_step_line"] >= 1.0 and "tlt/spot_failures" not in later


def test_what_is_served_is_the_oldest_drafter_and_any_other_than_wanted_is_a_failure(log):
    new = DrafterStatus(version=3, ok=True, seconds=0.2)
    log.reloaded(1, {"new": new, "old": dataclasses.replace(new, version=2)}, wanted=3)
    metrics = log.finish(1, {})
    assert metrics["tlt/drafter_version"] == 2.0
    assert metrics["tlt/reload_failures"] == 1.0
    assert metrics["tlt/overhead_reload_s"] == 0.2


def test_what_ranks_took_out_of_forward_and_weight_sync_is_overhead_by_the_slowest(log):
    copies = CapturedStates(None, None, seconds=0.1, errors=0, sync_seconds=0.4)
    log.captured([copies, dataclasses.replace(copies, seconds=0.2, sync_seconds=0.0)])
    metrics = log.finish(1, {})
    assert (metrics["tlt/overhead_capture_s"], metrics["tlt/overhead_sync_s"]) == (0.2, 0.4)
    assert metrics["tlt/overhead_s"] == sum((0.2, 0.4))


def test_the_sampling_phases_of_a_step_add_up_and_the_next_step_begins_with_none(log):
    log.sampled(1, PhaseReport(IdleTime({"a": 1.0}, 0.5, 10.0), end=10.0))
    log.sampled(1, PhaseReport(IdleTime({"a": 2.0, "b": 4.0}, 0.0, 20.0), end=20.0))
    metrics = log.finish(1, {})
    assert (metrics["tlt/idle_s"], metrics["tlt/trained_s"]) == (7.0, 0.5)
    assert not {"tlt/idle_s", "tlt/trained_s"} & log.finish(2, {}).keys()
