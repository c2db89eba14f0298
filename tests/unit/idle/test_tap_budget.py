"""Tokens captured of a step, which follow the bubbles."""

import pytest

from verl_tlt.config import TOKENS_PER_STEP
from verl_tlt.idle.tap_budget import Bubble, TapBudget

RAN_OUT = Bubble(seconds=100.0, trained_s=10.0, exhausted=True)
STOPPED = Bubble(seconds=100.0, trained_s=99.0, exhausted=False)
BRIEF = Bubble(seconds=0.5, trained_s=0.1, exhausted=True)
TOKEN = 28_672
"""Bytes of a 7B policy's hidden states at one position."""
ROOM = 1_000_000 * TOKEN


@pytest.mark.parametrize(
    ("bubbles", "grows"),
    [
        ([RAN_OUT], True),
        ([RAN_OUT, RAN_OUT, STOPPED], True),
        ([RAN_OUT, STOPPED], False),
        ([STOPPED], False),
        ([BRIEF], False),
        ([BRIEF, BRIEF, RAN_OUT], True),
        ([], False),
        ([Bubble(100.0, 10.0, exhausted=False)], False),
        ([Bubble(100.0, 81.0, exhausted=True)], False),
    ],
)
def test_it_doubles_where_most_ran_out_of_data_in_long_bubbles(bubbles, grows):
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    budget.sampled(bubbles, TOKEN)
    assert budget.tokens == TOKENS_PER_STEP * (2 if grows else 1)


def test_two_steps_fit_into_the_buffer():
    budget = TapBudget(TOKENS_PER_STEP, True, 50_000 * TOKEN)
    budget.sampled([RAN_OUT], 0.0)
    assert budget.tokens == TOKENS_PER_STEP, "the size of a token is not known yet"
    for _ in range(10):
        budget.sampled([RAN_OUT], TOKEN)
    assert budget.tokens == 25_000
    budget.sampled([RAN_OUT], 10 * TOKEN)
    assert budget.tokens == 25_000, "it never shrinks for that"


def test_copying_that_takes_noticeable_time_halves_it_for_good():
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    for _ in range(3):
        budget.sampled([RAN_OUT], TOKEN)
    budget.tapped(9.0, 100.0)
    assert budget.tokens == 8 * TOKENS_PER_STEP, "how long a step takes is not known yet"
    budget.tapped(0.49, 200.0)
    assert budget.tokens == 8 * TOKENS_PER_STEP
    budget.tapped(0.51, 300.0)
    budget.sampled([RAN_OUT], TOKEN)
    assert budget.tokens == 4 * TOKENS_PER_STEP
    for step in range(5):
        budget.tapped(1.0, 400.0 + 100.0 * step)
    assert budget.tokens == TOKENS_PER_STEP


def test_a_size_that_was_set_is_not_touched():
    budget = TapBudget(100_000, False, ROOM)
    for step in range(3):
        budget.tapped(50.0, 100.0 * step)
        budget.sampled([RAN_OUT], TOKEN)
    assert budget.tokens == 100_000
