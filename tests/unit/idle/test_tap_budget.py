"""Tokens captured of a step, which follow the bubbles."""

import pytest

from verl_tlt.config import TOKENS_PER_STEP
from verl_tlt.idle.tap_budget import TapBudget

RAN_OUT, STOPPED, BRIEF = (100.0, 10.0, True), (100.0, 99.0, False), (0.5, 0.1, True)
"""Bubbles: seconds, those in which the replica trained, and whether it ran out of data."""
TOKEN = 28_672
"""Bytes of a 7B policy's hidden states at one position."""
ROOM = 1_000_000 * TOKEN


def by_replica(bubbles):
    return [dict(enumerate(column)) for column in zip(*bubbles, strict=True)] or [{}, {}, {}]


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
        ([(100.0, 10.0, False)], False),
        ([(100.0, 81.0, True)], False),
    ],
)
def test_it_doubles_where_most_ran_out_of_data_in_long_bubbles(bubbles, grows):
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    budget.sampled(*by_replica(bubbles), TOKEN)
    assert budget.tokens == TOKENS_PER_STEP * (2 if grows else 1)


def test_two_steps_fit_into_the_buffer():
    budget = TapBudget(TOKENS_PER_STEP, True, 50_000 * TOKEN)
    budget.sampled(*by_replica([RAN_OUT]), 0.0)
    assert budget.tokens == TOKENS_PER_STEP, "the size of a token is not known yet"
    for _ in range(10):
        budget.sampled(*by_replica([RAN_OUT]), TOKEN)
    assert budget.tokens == 25_000
    budget.sampled(*by_replica([RAN_OUT]), 10 * TOKEN)
    assert budget.tokens == 25_000, "it never shrinks for that"


def steps(budget, shares, bubbles=()):
    """Steps of 100 s in which the tap takes these shares of the time; the tokens after each."""
    found = []
    for share in shares:
        budget.sampled(*by_replica(bubbles), TOKEN)
        budget.tapped(share * 100.0, steps.now)
        steps.now += 100.0
        found.append(budget.tokens // TOKENS_PER_STEP)
    return found


steps.now = 0.0


def test_the_tap_may_take_so_much_of_a_step_and_no_more():
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    for _ in range(3):
        budget.sampled(*by_replica([RAN_OUT]), TOKEN)
    assert steps(budget, [0.9]) == [8], "how long a step takes is not known yet"
    assert steps(budget, [0.0004, 0.0049]) == [8, 8]
    assert steps(budget, [0.0051] * 3)[-1] == 4, "more than a share of most steps"
    assert steps(budget, [0.1] * 9)[-1] == 1, "and never below what it began with"


def test_one_slow_step_decides_nothing_and_growth_goes_on_after_it():
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    assert steps(budget, [0.0, 0.0001, 0.0001]) == [1, 1, 1]
    assert steps(budget, [0.3, 0.0001, 0.0001]) == [1, 1, 1], "a machine that paused"
    assert steps(budget, [0.0002, 0.0004, 0.0008], [RAN_OUT]) == [2, 4, 8]


def test_it_grows_again_once_copies_take_less_and_not_beyond_the_limit():
    budget = TapBudget(TOKENS_PER_STEP, True, ROOM)
    budget.sampled(*by_replica([RAN_OUT]), TOKEN)
    assert steps(budget, [0.0, *[0.02] * 4])[-1] == 1
    assert steps(budget, [0.003] * 4, [RAN_OUT])[-1] == 1, "twice the tokens would take 0.6 %"
    assert steps(budget, [0.002] * 3, [RAN_OUT])[-1] == 2


def test_a_size_that_was_set_is_not_touched():
    budget = TapBudget(100_000, False, ROOM)
    for step in range(3):
        budget.tapped(50.0, 100.0 * step)
        budget.sampled(*by_replica([RAN_OUT]), TOKEN)
    assert budget.tokens == 100_000
