"""Engine traces condensed for replay."""

import json

import numpy as np
import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100, TableCost
from benchmarks.simulate.recorded import recording, step_records, worth


def line(batch, k, seconds, clean=True, verified=None, accepted=None):
    verified = k if verified is None else verified
    accepted = [batch // 2 ** (i + 1) for i in range(verified)] if accepted is None else accepted
    row = dict(
        t=1.0, batch=batch, kv=batch * 100, k=k, verified=verified, drafts=batch if verified > 0 else 0,
        accepted=accepted, produced=batch + sum(accepted), latency_s=seconds, clean=clean,
    )  # fmt: skip
    return json.dumps(row)


def test_latency_acceptance_and_jitter_come_back():
    rng = np.random.default_rng(0)
    lines = [
        line(batch, k, QWEN3_8B_H100.seconds(batch, batch * 100, k, k) * rng.lognormal(0.0, 0.05))
        for batch in (64, 16, 4, 1)
        for k in (0, 1, 3)
        for _ in range(40)
    ]
    found = recording(step_records(lines))
    assert found.table.arms() == (0, 1, 3)
    assert found.jitter == pytest.approx(0.05, abs=0.015)
    assert found.acceptance[0] == pytest.approx(0.5, abs=0.02)
    cost = TableCost(found.table)
    assert cost.seconds(16, 0, 3, 3) == pytest.approx(QWEN3_8B_H100.seconds(16, 1600, 3, 3), rel=0.03)


def test_only_enough_clean_steady_steps_tell_latency():
    lines = [line(8, 1, 0.01)] * 5 + [line(8, 1, 9.0, clean=False)] * 50 + [line(8, 3, 9.0, verified=1)] * 50
    lines += [line(8, 0, 0.01)] * 2  # too few
    found = recording(step_records(lines))
    assert [(p.batch, p.draft_length, p.seconds) for p in found.table.points] == [(8, 1, 0.01)]


def test_a_line_cut_short_is_skipped_and_a_foreign_one_is_not():
    assert len(list(step_records([line(8, 0, 0.01), line(8, 0, 0.01)[:30], ""]))) == 1
    with pytest.raises(KeyError):
        list(step_records(['{"kind": "step"}']))


def linear(batch: int, k: int) -> float:
    """Ten seconds a step, one more for each request and drafted token."""
    return 10.0 + batch * k


def test_worth_is_the_speed_of_the_chosen_over_the_best():
    accepted = [0.9, 0.8, 0.1]  # one request alone: (1, 1.9, 2.7, 2.8) tokens in (10, 11, 12, 13) s, K=2 is best
    assert worth(step_records([line(1, 2, 0.1)] * 3), linear, accepted) == pytest.approx(100.0)
    best = 2.7 / 12.0
    assert worth(step_records([line(1, 3, 0.1)] * 3), linear, accepted) == pytest.approx(100 * (2.8 / 13) / best)
    both = worth(step_records([line(1, 2, 0.1), line(1, 0, 0.1)]), linear, accepted)
    assert both == pytest.approx(100 * (2.7 + 1.0) / best / (12.0 + 10.0))
    large = worth(step_records([line(100, 2, 0.1)]), linear, accepted)
    assert large == pytest.approx(100 * 27 / 210), "at this batch drafts do not pay"
    assert worth(step_records([line(4, -1, 0.1, accepted=[], verified=0)]), linear, [0.9]) == 0.0
