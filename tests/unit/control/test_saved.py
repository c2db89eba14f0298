"""Seconds saved against stock."""

import pytest

from verl_tlt.control.saved import SavedTime, stock_seconds
from verl_tlt.control.types import StepRecord


def stock(batch, kv_tokens):
    return 0.01 + 1e-7 * kv_tokens


def record(batch, produced, latency):
    return StepRecord(batch, 1000 * batch, 3, 3, batch, (batch, 0, 0), produced, latency, True)


def test_stock_needs_one_step_per_token_of_a_request():
    assert stock_seconds(8, 4, 4000, stock) == pytest.approx(2 * stock(4, 4000))
    assert stock_seconds(0, 0, 0, stock) == 0.0


def test_saved_seconds_add_up_and_may_be_negative():
    saved = SavedTime(stock)
    saved.add(record(4, 8, 0.012))
    assert saved.saved_s == pytest.approx(2 * stock(4, 4000) - 0.012)
    saved.add(record(4, 4, 0.1))
    assert saved.saved_s < 0


def test_steps_mixed_with_prefill_are_left_out():
    saved = SavedTime(stock)
    saved.add(record(4, 8, 0.012), mixed=True)
    assert saved.engine_s == saved.stock_s == saved.saved_s == 0.0
