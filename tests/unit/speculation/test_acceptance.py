"""Acceptance by draft position: what is known before, what drafts teach, and how fast it forgets."""

import numpy as np
import pytest

from verl_tlt.speculation.acceptance import DECAY, FIRST_GUESS, AcceptanceEstimate, expected_accept_lengths
from verl_tlt.speculation.types import ControlError


def draft(rng, rates, k, drafts):
    """How many of so many drafts of K tokens had their first 1, 2, ... tokens accepted."""
    hits = rng.random((drafts, k)) < np.asarray(rates[:k])
    return tuple(int(n) for n in np.logical_and.accumulate(hits, axis=1).sum(axis=0))


def test_an_unknown_drafter_is_a_guess_and_a_known_one_its_held_out_acceptance():
    assert AcceptanceEstimate(3).conditional == [FIRST_GUESS, FIRST_GUESS * DECAY, FIRST_GUESS * DECAY**2]
    assert expected_accept_lengths([0.5, 0.4], 2) == [1.0, 1.5, pytest.approx(1.7)]
    assert expected_accept_lengths([0.5], 2)[2] == pytest.approx(1.5 + 0.5 * 0.5 * DECAY)
    assert expected_accept_lengths([0.0, 0.0, 0.0], 3)[3] == 1.0
    with pytest.raises(ControlError, match=r"0\.\.1, not 1\.2"):
        AcceptanceEstimate(2, [0.5, 1.2])


def test_drafts_replace_what_was_expected_and_later_ones_the_earlier():
    rng, rates = np.random.default_rng(0), (0.8, 0.7, 0.5)
    estimate = AcceptanceEstimate(3, [0.2, 0.2, 0.2])
    for _ in range(200):
        estimate.observe(8, draft(rng, rates, 3, 8))
    assert estimate.conditional == pytest.approx(rates, abs=0.08)
    assert estimate.accept_lengths()[3] == pytest.approx(1 + 0.8 + 0.56 + 0.28, abs=0.15)
    for _ in range(300):
        estimate.observe(4, draft(rng, (0.3, 0.3), 2, 4))
    assert estimate.conditional[0] == pytest.approx(0.3, abs=0.08)


def test_a_short_draft_tells_nothing_of_later_positions_but_moves_them_along():
    estimate = AcceptanceEstimate(3, [0.8, 0.4, 0.2])
    for _ in range(100):
        estimate.observe(16, (8,))
    assert estimate.conditional == pytest.approx([0.5, 0.25, 0.125], abs=0.01), "their ratios are kept"
    for _ in range(100):
        estimate.observe(16, (8, 2, 1))
    for _ in range(100):
        estimate.observe(16, (4,))
    assert estimate.conditional == pytest.approx([0.25, 0.125, 0.25], abs=0.02), "those of the drafts in between"


def test_one_step_of_a_large_batch_is_not_the_whole_window():
    estimate = AcceptanceEstimate(1, [0.5])
    for _ in range(50):
        estimate.observe(256, (128,))
    estimate.observe(256, (256,))
    assert 0.5 < estimate.conditional[0] < 0.6


def test_steps_without_drafts_change_nothing():
    estimate = AcceptanceEstimate(2, [0.5, 0.5])
    estimate.observe(0, ())
    estimate.observe(0, (0, 0))
    assert estimate.conditional == [0.5, 0.5]
