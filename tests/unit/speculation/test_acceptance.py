"""The acceptance estimate: what a draft shows of shorter ones, how evidence ages, and what is guessed."""

import math
import random

import pytest

from verl_tlt.speculation.acceptance import DECAY_GUESS, AcceptanceEstimate, expected_accept_lengths
from verl_tlt.speculation.types import ControlError


def seen(positions, drafts, accepted, steps=1):
    """An estimate that saw so many steps of so many drafts."""
    estimate = AcceptanceEstimate(positions)
    for _ in range(steps):
        estimate.observe(drafts, accepted)
    return estimate


def test_what_is_expected_chains_the_acceptance_and_guesses_on_where_it_ends():
    assert expected_accept_lengths([0.8, 0.5], 3) == pytest.approx([1.0, 1.8, 2.2, 2.2 + 0.4 * 0.5 * DECAY_GUESS])
    assert expected_accept_lengths([0.8, 0.5], 1) == pytest.approx([1.0, 1.8])


def test_a_long_draft_informs_every_shorter_one():
    accepted = [26, 20, 16, 13, 11, 8, 7]
    long, short = (seen(7, 32, accepted[:k], steps=200) for k in (7, 2))
    assert all(long.uncertainty(i) < 0.05 for i in range(7))
    assert [short.uncertainty(i) < 0.05 for i in range(7)] == [True, True, False, False, False, False, False]
    assert long.accept_lengths[:3] == pytest.approx(short.accept_lengths[:3], rel=0.05)


@pytest.mark.parametrize("prior", [[1.2], [0.5, -0.1]])
def test_a_prior_outside_0_1_is_refused(prior):
    with pytest.raises(ControlError, match=r"0\.\.1"):
        AcceptanceEstimate(3).set_prior(prior)


def test_steps_without_drafts_teach_nothing():
    estimate = AcceptanceEstimate(2)
    before = estimate.conditional
    estimate.observe(0, ())
    estimate.observe(5, ())
    assert estimate.conditional == before


def spread(p, votes):
    """Standard deviation of the belief after so many votes, the prior's among them."""
    p = (p * votes + 0.5) / (votes + 1.0)
    return math.sqrt(p * (1.0 - p) / (votes + 1.0))


@pytest.mark.parametrize(("batch", "steps"), [(2, 300), (10, 60), (64, 16)])
def test_the_window_is_of_600_drafts_or_of_16_steps_whichever_is_longer(batch, steps):
    estimate = seen(1, batch, [batch // 2], steps=20 * steps)
    votes = batch / (1 - math.exp(-1 / steps))
    assert estimate.conditional == pytest.approx([0.5])
    assert estimate.uncertainty(0) == pytest.approx(spread(0.5, votes + 2), rel=1e-6)


def test_what_a_large_batch_showed_is_dropped_within_forty_drafts_of_a_harder_tail():
    """As recorded of a language model: 0.8 at every position in the large batch, half of that in the tail.

    Later positions follow the first by their ratio until they are seen again.
    """
    estimate, rng = seen(4, 64, [51, 41, 33, 26], steps=60), random.Random(0)
    assert estimate.conditional == pytest.approx([0.8] * 4, abs=0.02)
    for _ in range(40):
        right = [rng.random() < 0.4 for _ in range(4)]
        estimate.observe(1, [all(right[: i + 1]) for i in range(4)])
    assert estimate.conditional[0] == pytest.approx(0.4, abs=0.15)
    assert estimate.accept_lengths[4] < 2.1, "it is 1.65, and was 3.4"


def test_a_tail_that_is_like_the_large_batch_keeps_what_that_showed():
    estimate, rng = AcceptanceEstimate(1), random.Random(0)
    for _ in range(60):
        estimate.observe(64, [sum(rng.random() < 0.7 for _ in range(64))])
    before = estimate.uncertainty(0)
    for _ in range(200):
        estimate.observe(1, [rng.random() < 0.7])
    assert estimate.uncertainty(0) < 1.2 * before


@pytest.mark.parametrize(("prior", "weight", "votes"), [([], 24.0, 2.0), ([0.5], 2.0, 2.0), ([0.5], 24.0, 24.0)])
def test_a_prior_drops_the_old_drafter_and_is_worth_its_weight_in_drafts(prior, weight, votes):
    estimate = seen(1, 64, [6], steps=50)
    estimate.set_prior(prior, weight=weight)
    estimate.observe(10, [9])
    assert estimate.conditional == pytest.approx([(9 + votes * 0.5) / (10 + votes)])


def test_what_is_not_looked_at_counts_half_after_its_time():
    known, stale, other = (seen(1, 10, [8]) for _ in range(3))
    p = (8 + 1) / 12
    assert known.uncertainty(0) == pytest.approx(spread(p, 12))
    stale.skip(4000)
    assert stale.uncertainty(0) == pytest.approx(spread(p, 7))
    other.skip(4000)
    other.observe(10, [5])  # what was known before counts half for good
    keep = math.exp(-10 / 600)
    hits, trials = 4 * keep + 5, 5 * keep + 10
    assert other.conditional == pytest.approx([(hits + 1) / (trials + 2)])


def test_a_position_that_nobody_reached_learns_nothing_but_was_looked_at():
    assert seen(2, 20, [0, 0]).conditional == pytest.approx([1 / 22, 1 / 22 * DECAY_GUESS])


def test_the_uncertainty_of_an_accept_length_adds_up_over_its_positions():
    estimate = AcceptanceEstimate(2)
    estimate.set_prior([0.8, 0.5], weight=9)
    a, b = spread(0.8, 9), spread(0.5, 9)
    # tau(2) = 1 + p0 + p0 p1
    assert estimate.accept_length_uncertainty() == pytest.approx([0.0, a, math.hypot(a * (1 + 0.5), b * 0.8)])


def test_the_longer_a_position_is_out_of_sight_the_more_its_ratio_to_the_one_before_speaks_for_it():
    estimate = seen(2, 10, [10, 2])
    for _ in range(4):
        estimate.observe(16, [16])
    first, second = estimate.conditional
    votes, fresh = 2 + 64 / 16, 4000 / 4064
    expected = (2 * fresh + votes * min(1.0, first * DECAY_GUESS)) / (10 * fresh + votes)
    assert second == pytest.approx(expected, rel=1e-6)


def test_the_ratio_of_two_positions_is_what_was_seen_of_them():
    """When the first is accepted wholly, the second follows by that ratio."""
    estimate = seen(2, 100, [50, 20], steps=20)
    assert estimate.conditional == pytest.approx([0.5, 0.4], abs=0.02)
    for _ in range(2000):
        estimate.observe(100, [100])
    assert estimate.conditional == pytest.approx([1.0, 0.8], abs=0.03)
