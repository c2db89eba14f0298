"""The demo's runs against each other."""

import json

import pytest

from demo.comparison import ratio, rows_of_metrics_file, summary
from verl_tlt.report.reader import TraceError
from verl_tlt.report.rows import step_row

VERL = {
    "critic/score/mean": 0.25, "timing_s/step": 37.0, "timing_s/gen": 26.0,
    "response_length/mean": 60.5625, "prompt_length/mean": 27.25, "perf/total_num_tokens": 1405,
}  # fmt: skip


def metrics_file(path, *steps):
    lines = [json.dumps({"step": step, "data": data}) for step, data in steps]
    path.write_text("\n".join(lines) + '\n{"step": 9, "da')
    return path


def row(step, rollout_s, step_s, tokens):
    lengths = {"response_length/mean": tokens, "prompt_length/mean": 0.0, "perf/total_num_tokens": tokens}
    return step, step_row({"timing_s/gen": rollout_s, "timing_s/step": step_s, **lengths})


def test_rows_of_verls_metrics_file(tmp_path):
    path = metrics_file(tmp_path / "m.jsonl", (0, {"val/acc": 1.0}), (1, VERL), (2, VERL | {"critic/score/mean": 0.5}))
    assert [(step, r["reward"], r["tokens"]) for step, r in rows_of_metrics_file(path).items()] == [
        (1, 0.25, 969), (2, 0.5, 969)]  # fmt: skip


def test_ratio_is_per_token_and_discards_the_first_step():
    stock = dict([row(1, 999.0, 999.0, 1), row(2, 10.0, 14.0, 1000), row(3, 20.0, 24.0, 1000)])
    tlt = dict([row(1, 1.0, 1.0, 999), row(2, 10.0, 14.0, 2000), row(3, 10.0, 14.0, 1000)])
    rollout = ratio(stock, tlt, "rollout_s")
    assert rollout.mean == pytest.approx((30 / 2000) / (20 / 3000))
    assert (rollout.low, rollout.high) == pytest.approx((2.0, 2.0))
    assert ratio(stock, tlt, "step_s").high == pytest.approx((14 / 1000) / (14 / 2000))
    assert ratio({1: stock[1]}, {1: tlt[1]}, "rollout_s") is None
    assert summary(1.0, {1: tlt[1]}, {1: stock[1]})["rollout_ratio"] is None


def test_a_missing_or_empty_metrics_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"gone\.jsonl cannot be read"):
        rows_of_metrics_file(tmp_path / "gone.jsonl")
    with pytest.raises(TraceError, match="no finished training step"):
        rows_of_metrics_file(metrics_file(tmp_path / "m.jsonl", (0, {"val/acc": 1.0})))
