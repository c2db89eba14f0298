"""The table of a run: the same columns from a trace and from verl's own metrics file."""

import json

import pytest
from rich.console import Console

from verl_tlt.report.reader import TraceError, read_trace
from verl_tlt.report.summary import StepRow, ratio, rich_table, rows_of_metrics_file, rows_of_trace, summary

STEP_KEYS = {
    "step", "reward", "step_s", "rollout_s", "train_s", "tokens", "accept_length", "bubble_s", "bubble_trained_s",
    "overhead_s", "saved_s", "stop_latency_s", "drafter_version_published", "drafter_version_served", "probs_diff_max",
}  # fmt: skip

VERL = {
    "critic/score/mean": 0.25, "timing_s/step": 37.0, "timing_s/gen": 26.0, "timing_s/old_log_prob": 0.5,
    "timing_s/adv": 0.02, "timing_s/update_actor": 0.58, "timing_s/update_weights": 0.13,
    "response_length/mean": 60.5625, "prompt_length/mean": 27.25, "perf/total_num_tokens": 1405,
    "training/rollout_probs_diff_max": 4e-9,
}  # fmt: skip


def metrics_file(path, *steps):
    lines = [json.dumps({"step": step, "data": data}) for step, data in steps]
    path.write_text("\n".join(lines) + '\n{"step": 9, "da')
    return path


def row(step, rollout_s, step_s, tokens):
    empty = dict.fromkeys(STEP_KEYS)
    return StepRow(**(empty | {"step": step, "rollout_s": rollout_s, "step_s": step_s, "tokens": tokens}))


def test_rows_of_a_stock_run(tmp_path):
    path = metrics_file(tmp_path / "m.jsonl", (0, {"val/acc": 1.0}), (1, VERL), (2, VERL | {"critic/score/mean": 0.5}))
    rows = rows_of_metrics_file(path)
    assert [r.reward for r in rows] == [0.25, 0.5]
    first = rows[0]
    assert first.tokens == 969  # 16 responses of 60.5625
    assert first.train_s == pytest.approx(1.10)
    assert (first.rollout_s, first.step_s, first.probs_diff_max) == (26.0, 37.0, 4e-9)
    assert first.accept_length == 1.0
    assert first.bubble_s is None and first.drafter_version_served is None


def test_rows_of_a_trace(made_run):
    rows = rows_of_trace(read_trace(made_run.directory))
    assert [r.step for r in rows] == list(range(1, 7))
    for r in rows:
        assert r.bubble_s == pytest.approx(made_run.bubble_s[r.step])
        assert r.accept_length == pytest.approx(made_run.accept_length[r.step])
        assert r.saved_s == pytest.approx(made_run.saved_s[r.step], abs=1e-3)
        assert r.train_s == pytest.approx(4.1)
    assert rows[0].bubble_trained_s == 0.0 and rows[0].stop_latency_s is None
    assert rows[-1].drafter_version_published == rows[-1].drafter_version_served == 5


def test_summary_has_exactly_the_promised_keys(made_run, tmp_path):
    rows = rows_of_trace(read_trace(made_run.directory))
    alone = summary(12.5, rows)
    assert set(alone) == {"seconds", "steps"} and alone["seconds"] == 12.5
    assert all(set(step) == STEP_KEYS for step in alone["steps"])
    stock = rows_of_metrics_file(metrics_file(tmp_path / "m.jsonl", *((s, VERL) for s in range(1, 7))))
    compared = summary(12.5, rows, stock, warm=rows)
    assert set(compared) == {"seconds", "steps", "stock", "rollout_ratio", "e2e_ratio", "warm_rollout_ratio"}
    assert set(compared["stock"][0]) == STEP_KEYS
    assert compared["rollout_ratio"] == compared["warm_rollout_ratio"] > 0
    assert json.loads(json.dumps(compared)) == compared


def test_ratio_is_per_token_and_discards_the_first_step():
    stock = [row(1, 999.0, 999.0, 1), row(2, 10.0, 14.0, 1000), row(3, 20.0, 24.0, 1000)]
    tlt = [row(1, 1.0, 1.0, 999), row(2, 10.0, 14.0, 2000), row(3, 10.0, 14.0, 1000)]
    rollout = ratio(stock, tlt, "rollout_s")
    assert rollout.mean == pytest.approx((30 / 2000) / (20 / 3000))
    assert (rollout.low, rollout.high) == pytest.approx((2.0, 2.0))
    assert ratio(stock, tlt, "step_s").high == pytest.approx((14 / 1000) / (14 / 2000))
    assert ratio(stock[:1], tlt[:1], "rollout_s") is None
    assert summary(1.0, tlt[:1], stock[:1])["rollout_ratio"] is None


def test_a_missing_or_empty_metrics_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"gone\.jsonl cannot be read"):
        rows_of_metrics_file(tmp_path / "gone.jsonl")
    with pytest.raises(TraceError, match="no finished training step"):
        rows_of_metrics_file(metrics_file(tmp_path / "m.jsonl", (0, {"val/acc": 1.0})))


def test_the_table_leaves_out_columns_nothing_filled(tmp_path):
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    rows = rows_of_metrics_file(metrics_file(tmp_path / "m.jsonl", (1, VERL)))
    console.print(rich_table(rows, "stock verl", 160))
    text = console.export_text()
    assert "969" in text and "reward" in text
    assert "bubble" not in text and "served" not in text


@pytest.mark.parametrize("width", [80, 100, 150])
def test_the_table_fits_the_terminal(made_run, tmp_path, width):
    console = Console(width=width, record=True, file=(tmp_path / "out").open("w"))
    console.print(rich_table(rows_of_trace(read_trace(made_run.directory)), "run", console.width))
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for wanted in ("reward", "rollout", "accept", "bubble", "served"):
        assert wanted in text
    assert ("diff" in text) == (width == 150)
