"""The table of a run, with one row per RL step."""

import pytest
from rich.console import Console

from verl_tlt.report.reader import read_trace
from verl_tlt.report.rows import rich_table, rows_of_trace, step_row

VERL = {
    "critic/score/mean": 0.25, "timing_s/step": 37.0, "timing_s/gen": 26.0, "timing_s/old_log_prob": 0.5,
    "timing_s/adv": 0.02, "timing_s/update_actor": 0.58, "timing_s/update_weights": 0.13,
    "response_length/mean": 60.5625, "prompt_length/mean": 27.25, "perf/total_num_tokens": 1405,
    "training/rollout_probs_diff_max": 4e-9,
}  # fmt: skip


def printed(rows, width, path):
    console = Console(width=width, record=True, file=path.open("w"))
    console.print(rich_table(rows, "a run", width))
    return console.export_text()


def test_a_row_of_a_stock_run():
    row = step_row(1, VERL)
    assert row.tokens == 969  # 16 responses of 60.5625
    assert row.train_s == pytest.approx(1.10)
    assert (row.reward, row.rollout_s, row.step_s, row.probs_diff_max) == (0.25, 26.0, 37.0, 4e-9)
    assert row.accept_length == 1.0
    assert row.bubble_s is None and row.drafter_version_served is None


def test_rows_of_a_trace(made_run):
    rows = rows_of_trace(read_trace(made_run.directory))
    assert [r.step for r in rows] == list(range(1, 7))
    for r in rows:
        assert r.bubble_s == pytest.approx(made_run.bubble_s[r.step])
        assert r.accept_length == pytest.approx(made_run.accept_length[r.step])
        saved = made_run.saved_s[r.step] if r.accept_length > 1 else None
        assert r.saved_s == (saved if saved is None else pytest.approx(saved, abs=1e-3))
        assert r.train_s == pytest.approx(4.1)
    assert rows[0].bubble_trained_s == 0.0 and rows[0].stop_latency_s is None
    assert rows[-1].drafter_version_published == rows[-1].drafter_version_served == 5


def test_the_table_leaves_out_columns_nothing_filled(tmp_path):
    text = printed([step_row(1, VERL)], 160, tmp_path / "out")
    assert "969" in text and "reward" in text
    assert "bubble" not in text and "served" not in text


@pytest.mark.parametrize("width", [80, 100, 150])
def test_the_table_fits_the_terminal(made_run, tmp_path, width):
    text = printed(rows_of_trace(read_trace(made_run.directory)), width, tmp_path / "out")
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for wanted in ("reward", "rollout", "accept", "bubble", "served"):
        assert wanted in text
    assert ("diff" in text) == (width == 150)
