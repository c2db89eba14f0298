"""The acceptance estimate: full information, forgetting, jumps, staleness."""

import numpy as np
import pytest

from verl_tlt.speculation.acceptance import DECAY_GUESS, AcceptanceEstimate, expected_accept_lengths
from verl_tlt.speculation.types import ControlError


def feed(estimate, conditional, k, batch, steps, rng):
    """Verify `steps` drafts of length `k` on `batch` requests whose true acceptance is `conditional`."""
    for _ in range(steps):
        left, accepted = batch, []
        for p in conditional[:k]:
            left = int(rng.binomial(left, p))
            accepted.append(left)
        estimate.observe(batch, accepted)


def true_tau(conditional):
    return [1.0, *(1.0 + np.cumsum(np.cumprod(conditional)))]


def test_what_is_expected_chains_the_acceptance_and_guesses_on_where_it_ends():
    assert expected_accept_lengths([0.8, 0.5], 3) == pytest.approx([1.0, 1.8, 2.2, 2.2 + 0.4 * 0.5 * DECAY_GUESS])
    assert expected_accept_lengths([0.8, 0.5], 1) == pytest.approx([1.0, 1.8])


def test_it_converges_to_the_truth_from_long_drafts():
    truth = [0.9, 0.8, 0.7, 0.6]
    estimate = AcceptanceEstimate(4)
    feed(estimate, truth, 4, 64, 400, np.random.default_rng(0))
    assert estimate.conditional() == pytest.approx(truth, abs=0.04)
    assert estimate.accept_lengths() == pytest.approx(true_tau(truth), rel=0.03)


def test_a_long_draft_informs_every_shorter_one():
    estimate = AcceptanceEstimate(7)
    feed(estimate, [0.8] * 7, 7, 32, 200, np.random.default_rng(0))
    short = AcceptanceEstimate(7)
    feed(short, [0.8] * 7, 2, 32, 200, np.random.default_rng(0))
    assert all(estimate.uncertainty(i) < 0.05 for i in range(7))
    assert [short.uncertainty(i) < 0.05 for i in range(7)] == [True, True, False, False, False, False, False]
    assert estimate.accept_lengths()[:3] == pytest.approx(short.accept_lengths()[:3], rel=0.05)


def test_it_follows_a_drift():
    rng = np.random.default_rng(1)
    estimate = AcceptanceEstimate(2)
    for p in np.linspace(0.8, 0.5, 60):
        feed(estimate, [p, p], 2, 16, 10, rng)
    assert estimate.conditional()[0] == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_jump_is_noticed_within_a_few_dozen_drafts(batch):
    rng = np.random.default_rng(2)
    estimate = AcceptanceEstimate(1)
    feed(estimate, [0.02], 1, batch, 800, rng)
    feed(estimate, [0.8], 1, batch, max(2, 64 // batch), rng)
    assert estimate.conditional()[0] > 0.5


def test_a_position_out_of_sight_keeps_its_ratio_to_the_one_before():
    rng = np.random.default_rng(3)
    estimate = AcceptanceEstimate(3)
    feed(estimate, [0.9, 0.8, 0.8], 3, 32, 300, rng)
    feed(estimate, [0.45, 0.4, 0.4], 1, 32, 2000, rng)
    assert estimate.conditional()[1] == pytest.approx(0.45 * 0.8 / 0.9, abs=0.08)


def test_uncertainty_shrinks_with_drafts_and_grows_while_nobody_looks():
    estimate = AcceptanceEstimate(1)
    at_first = estimate.uncertainty(0)
    feed(estimate, [0.6], 1, 8, 200, np.random.default_rng(4))
    known = estimate.uncertainty(0)
    estimate.skip(100_000)
    assert known < 0.03 < 0.08 < estimate.uncertainty(0) <= at_first
    assert estimate.conditional()[0] == pytest.approx(0.6, abs=0.05), "staleness widens the belief, it does not move it"


def test_a_prior_is_believed_until_evidence_speaks():
    estimate = AcceptanceEstimate(4)
    estimate.set_prior([0.9, 0.8], weight=24)
    assert estimate.conditional() == pytest.approx([0.9, 0.8, 0.76, 0.722])
    feed(estimate, [0.1, 0.1, 0.1, 0.1], 4, 64, 50, np.random.default_rng(5))
    assert estimate.conditional()[0] == pytest.approx(0.1, abs=0.05)


def test_a_new_prior_drops_the_old_drafter():
    estimate = AcceptanceEstimate(2)
    feed(estimate, [0.1, 0.1], 2, 64, 50, np.random.default_rng(6))
    estimate.set_prior([0.7])
    assert estimate.conditional()[0] == pytest.approx(0.7)


@pytest.mark.parametrize("prior", [[1.2], [0.5, -0.1]])
def test_a_prior_outside_0_1_is_refused(prior):
    with pytest.raises(ControlError, match=r"0\.\.1"):
        AcceptanceEstimate(3).set_prior(prior)


def test_steps_without_drafts_teach_nothing():
    estimate = AcceptanceEstimate(2)
    before = estimate.conditional()
    estimate.observe(0, ())
    estimate.observe(5, ())
    assert estimate.conditional() == before
