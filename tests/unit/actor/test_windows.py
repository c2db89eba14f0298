"""Which sequences the tap copies, and which window of each: every length gets its share of the tokens."""

import random

import numpy as np
import pytest
from long_tail import long_tailed, share_by_decile

from verl_tlt.actor.tap import choose_window, select_for_tap

WHOLE = 10**9
"""A window that cuts no sequence."""


@pytest.mark.parametrize("budget", [1, 500, 8192, 10**9])
@pytest.mark.parametrize("window", [WHOLE, 64, 4096])
def test_the_tap_budget_holds_and_something_is_always_chosen(budget, window):
    rng = random.Random(0)
    for _ in range(50):
        lengths = long_tailed(rng.randint(1, 80), rng)
        chosen = select_for_tap(lengths, budget, rng, window)
        cap = min(budget, window)
        assert chosen and chosen == sorted(set(chosen))
        assert sum(min(lengths[i], cap) for i in chosen) <= budget


def test_the_choice_repeats_with_its_seed_and_varies_without():
    lengths = long_tailed(64, random.Random(1))
    first = select_for_tap(lengths, 4000, random.Random(7), WHOLE)
    assert first == select_for_tap(lengths, 4000, random.Random(7), WHOLE)
    assert first != select_for_tap(lengths, 4000, random.Random(8), WHOLE)


@pytest.mark.parametrize("window", [WHOLE, 1000])
def test_each_decile_is_captured_in_proportion_to_its_tokens(window):
    rng = random.Random(3)
    lengths = long_tailed(200, rng)
    captured, budget = np.zeros(200), sum(lengths) // 8
    draws = 600
    for _ in range(draws):
        for i in select_for_tap(lengths, budget, rng, window):
            captured[i] += min(lengths[i], window, budget)
    shares, fair = share_by_decile(lengths, captured), share_by_decile(lengths, lengths)
    assert np.all(captured > 0)
    assert shares[-1] == pytest.approx(fair[-1], rel=0.05)
    assert shares == pytest.approx(fair, rel=0.12)
    assert captured.sum() / draws > 0.85 * budget


def test_every_single_choice_spans_the_lengths():
    """Nine or ten of 100 evenly spaced lengths: the widest gap stays near the stride; blind draws leave twice that."""
    rng = random.Random(4)
    lengths = list(range(10, 1010, 10))

    def widest_gap(chosen):
        return max(np.diff([0, *sorted(lengths[i] for i in chosen), 1000]))

    ours = [widest_gap(select_for_tap(lengths, sum(lengths) // 10, rng, WHOLE)) for _ in range(200)]
    blind = [widest_gap(rng.sample(range(100), 9)) for _ in range(200)]
    assert np.mean(ours) < 200 < np.mean(blind)


def test_a_window_holds_true_positions_of_the_response():
    rng = random.Random(0)
    for _ in range(2000):
        length = rng.randint(2, 500)
        prompt_len, window = rng.randint(0, length - 1), rng.randint(1, 300)
        start, stop = choose_window(length, prompt_len, window, rng)
        assert 0 <= start < stop <= length
        assert stop - start == min(length, window)
        assert start >= prompt_len or stop == length


def test_windows_prefer_the_tail_but_reach_everywhere():
    rng = random.Random(0)
    starts = np.array([choose_window(10_000, 100, 1000, rng)[0] for _ in range(4000)])
    middle = (100 + 9000) / 2
    assert 0.71 < (starts > middle).mean() < 0.79  # the later of two uniform draws: 3/4
    assert starts.min() < 600 and starts.max() > 8900
