"""A run by RL step: its table, what belongs to a step, and what ran when."""

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import (
    counted,
    did_it_pay,
    learned,
    new_drafters,
    own_work_s,
    rich_table,
    rows_of_trace,
    sentences,
    speed,
    step_row,
)
from verl_tlt.commands.report.timeline import NO_STEP, most_trained, rl_steps, sampled
from verl_tlt.trace.events import TraceWriter

VERL = {
    "critic/score/mean": 0.25, "timing_s/step": 37.0, "timing_s/gen": 26.0, "response_length/mean": 60.5625,
    "prompt_length/mean": 27.25, "perf/total_num_tokens": 1405, "training/rollout_probs_diff_max": 4e-9,
}  # fmt: skip


def frame(rows):
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def printed(rows, path):
    console = Console(width=80, record=True, file=path.open("w"))
    console.print(rich_table(rows, "a run"))
    return console.export_text()


def test_a_row_of_a_stock_run():
    row = step_row(VERL)
    assert row["tokens"] == 969  # 16 responses of 60.5625
    assert (row["reward"], row["rollout_s"], row["step_s"], row["probs_diff_max"]) == (0.25, 26.0, 37.0, 4e-9)
    assert row["accept_length"] is None and row["idle_s"] is None and row["drafter_version_served"] is None


@pytest.mark.parametrize(
    ("saved", "k", "counted", "work"),
    [(5.0, 2.0, 5.0, 0.6), (1.2, 0.0, None, 1.0), (-1.2, 0.0, -1.2, 0.6), (None, 2.0, None, 1.0)],
)
def test_savings_count_where_something_was_drafted_and_contain_the_waits_for_k(saved, k, counted, work):
    metrics = {"tlt/draft_length_mean": k, "tlt/overhead_s": 1.0, "tlt/overhead_control_s": 0.4}
    row = step_row(metrics if saved is None else metrics | {"tlt/saved_estimate_s": saved})
    assert row["saved_s"] == counted and own_work_s(frame({1: row})).item() == pytest.approx(work)


def test_speed_counts_rollouts_whose_savings_are_known():
    row = {"tokens": 600.0, "rollout_s": 4.0, "saved_s": 2.0}
    said = "Rollouts made 150 tokens/s, and an estimated 100 tokens/s without drafts."
    assert speed(frame({1: row, 2: row, 3: row | {"saved_s": None, "rollout_s": 90.0}})) == said
    assert speed(frame({3: row | {"saved_s": None}})) == ""


def test_what_training_taught_the_drafter(made_run, tmp_path):
    trace = read_trace(made_run.directory)
    first, last = made_run.accept_length[3], made_run.accept_length[6]
    assert f"published 5 times: accept length {first:.2f} in step 3, {last:.2f} in step 6; on the same" in learned(
        trace
    )
    assert learned(trace).endswith("the run's first drafter has 1.01 and the last one 2.50.")
    assert new_drafters(rows_of_trace(trace)) == [3, 4, 5, 6], "version 1 is loaded at the end of step 2"
    served = [0.0, 1.0, None, 1.0, 1.0]
    assert new_drafters(frame({i: {"drafter_version_served": v} for i, v in enumerate(served, start=1)})) == [3]
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("step", step=1, metrics={"tlt/draft_length_mean": 0.0})
    assert learned(read_trace(tmp_path)) == ""
    writer.emit("publish", step=1, version=1, decision="published")
    assert learned(read_trace(tmp_path)) == "A newly trained drafter was published once.", "or by a cold start"
    writer.emit("step", step=2, metrics={"tlt/accept_length": 1.6})
    assert learned(read_trace(tmp_path)).endswith("published once: accept length 1.60 in step 2.")


@pytest.mark.parametrize(
    ("readings", "begun", "count"),
    [
        ([], [1], 0.0),
        ([0.0, 2.0, 2.0], [1], 2.0),
        ([1.0, 3.0, 0.0, 2.0], [1, 3], 5.0),
        ([1.0, 3.0, 4.0], [1, 2], 5.0),
        ([3.0, 1.0, 2.0], [], 5.0),
    ],
)
def test_what_failed_before_a_run_was_resumed_counts_too(readings, begun, count):
    assert counted(dict(enumerate(readings, start=1)), begun) == count


def test_the_table_of_a_trace_fits_a_terminal_and_leaves_out_what_nothing_filled(made_run, tmp_path):
    rows = rows_of_trace(read_trace(made_run.directory))
    assert list(rows.index) == list(range(1, 7))
    assert rows.idle_s.to_dict() == pytest.approx(made_run.bubble_s)
    assert rows.accept_length.dropna().to_dict() == pytest.approx(made_run.accept_length)
    assert rows.idle_trained_s[1] == 0.0 and rows.drafter_version_served[6] == 5
    text = printed(frame({1: step_row(VERL)}), tmp_path / "out")
    assert "26.0" in text and "idle" not in text and "drafter" not in text
    text = printed(rows, tmp_path / "out")
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    wanted = ("reward", "rollout", "accept", "length", "idle", "trained", "drafter", "8.2", "v5")
    assert all(words in text for words in wanted)


def test_every_step_holds_what_is_its_own(made_run):
    steps = rl_steps(read_trace(made_run.directory))
    assert list(steps) == list(range(1, 7))
    for number, step in steps.items():
        assert step.end - step.start == pytest.approx(made_run.rollout_s[number] + 0.06)
        assert [p.name for p in step.others][:3] == ["old_log_prob", "update_actor", "update_weights"]
        assert {s.step for s in step.sessions} <= {number}
    seconds = {n: sum(step.end - s.start for s in step.sessions) for n, step in steps.items()}
    assert most_trained(steps) == max(seconds, key=seconds.get)


def test_two_rollouts_of_a_step_are_one(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    for start, end in ((10.0, 14.0), (20.0, 26.0)):
        writer.emit("phase", step=1, name="rollout", start=start, end=end)
    for start in (5.0, 15.0, 27.0):
        writer.emit("phase", step=1, name="update_actor", start=start, end=start + 4.0)
    step = rl_steps(read_trace(tmp_path))[1]
    assert (step.start, step.end, step.rollout_s, step.finish) == (10.0, 26.0, 10.0, 31.0)
    assert [phase.start for phase in step.others] == [15.0, 27.0], "also what is between the rollouts"


def test_what_a_replica_decoded_at_a_moment(tmp_path):
    driver, engine = TraceWriter(tmp_path, "trainer"), TraceWriter(tmp_path, "engine-a")
    driver.emit("run", step0=1, replicas=["a", "b"])
    driver.emit("phase", step=1, name="rollout", start=0.0, end=6.0)
    driver.emit("load", step=1, inflight={"b": 7})
    for t, latency, batch, k in ((1.0, 0.5, 8, 0), (1.4, 0.4, 6, 2), (5.0, 0.5, 1, 4)):
        engine.write({"t": t, "latency_s": latency, "batch": batch, "k": k})
    trace = read_trace(tmp_path)
    at = np.array([0.2, 0.7, 1.2, 3.0, 4.8, 5.1])
    batch, k = sampled(trace, rl_steps(trace)[1], "a", at)
    assert batch.tolist() == [0, 8, 6, 0, 1, 0]
    assert k.tolist() == [NO_STEP, 0, 2, NO_STEP, 4, NO_STEP], "nothing ran before, after and in a long pause"
    batch, k = sampled(trace, rl_steps(trace)[1], "b", at)
    assert set(batch.tolist()) == {0} and set(k.tolist()) == {NO_STEP}, "the load was written later"


@pytest.mark.parametrize(("standalone", "batches"), [(["a"], [8, 6, 0]), ([], [8, 0, 0])])
def test_a_standalone_replica_decodes_on_while_the_trainer_works(tmp_path, standalone, batches):
    driver, engine = TraceWriter(tmp_path, "trainer"), TraceWriter(tmp_path, "engine-a")
    driver.emit("run", step0=1, replicas=["a"], standalone=standalone)
    driver.emit("phase", step=1, name="rollout", start=0.0, end=2.0)
    driver.emit("phase", step=1, name="update_actor", start=2.0, end=6.0)
    for t, batch in ((1.0, 8), (5.0, 6), (8.0, 4)):
        engine.write({"t": t, "latency_s": 0.5, "batch": batch, "k": 1})
    trace = read_trace(tmp_path)
    assert sampled(trace, rl_steps(trace)[1], "a", np.array([0.7, 4.7, 5.8]))[0].tolist() == batches


@pytest.mark.parametrize("standalone", [[], ["a"]])
def test_where_engines_decode_beside_the_trainer_what_they_save_is_not_the_steps(tmp_path, standalone):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("run", step0=1, replicas=["a"], standalone=standalone)
    metrics = {
        "timing_s/step": 40.0, "timing_s/gen": 2.0, "response_length/mean": 60.0, "prompt_length/mean": 20.0,
        "perf/total_num_tokens": 800.0, "tlt/saved_estimate_s": 10.0, "tlt/draft_length_mean": 2.0,
    }  # fmt: skip
    writer.emit("step", step=1, metrics=metrics)
    trace = read_trace(tmp_path)
    said = " ".join(sentences(trace))
    assert ("Engines decode while the trainer works" in said) == bool(standalone)
    assert ("tokens/s" in said) != bool(standalone), "the wait for samples is not the time of their tokens"
    share = "" if standalone else ", 20.0% of the 50 s that they would have taken without it"
    assert did_it_pay(trace).startswith(f"TLT saved an estimated 10.0 s in steps 1 to 1{share}: drafts saved 10.0 s")
    writer.emit("step", step=1, metrics=metrics | {"tlt/saved_estimate_s": -8.0})
    share = "" if standalone else " (25.0%)"
    lost = f"TLT made steps 1 to 1 an estimated 8.0 s longer{share}: drafts lost 8.0 s"
    assert did_it_pay(read_trace(tmp_path)).startswith(lost)
