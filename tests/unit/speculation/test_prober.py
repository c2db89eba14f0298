"""The probe budget: never more than its share, intervals double, news restart them. Then what is worth a probe."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from verl_tlt.speculation import prober
from verl_tlt.speculation.prober import LoadEstimates, ProbeBudget, at_best, find_probe
from verl_tlt.speculation.types import Load


def test_spending_is_bounded_by_the_share():
    budget, spent = ProbeBudget(0.01, 1, 1), 0.0
    for _ in range(10_000):
        budget.step()
        spent += 0.5 * budget.spend("arm", 0.5)
    assert 0.9 * 0.01 * 10_000 < spent <= 0.01 * 10_000 + 1.0


def test_intervals_double_up_to_their_maximum():
    budget, asked = ProbeBudget(1.0, 4, 16), []
    for step in range(100):
        budget.step()
        if budget.due("arm"):
            assert budget.spend("arm", 0.0)
            asked.append(step)
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps[:3] == [4, 8, 16] and set(gaps[2:]) == {16}


def test_subjects_are_apart_news_restart_them_and_too_dear_is_refused_at_no_cost():
    budget = ProbeBudget(0.01, 4, 64)
    assert not budget.spend("a", 5.0)
    assert budget.due("a") and budget.spend("a", 0.25), "the allowance is whole"
    assert not budget.due("a") and budget.due("b")
    budget.clear()
    assert budget.due("a")


ARMS = (0, 1, 3)


def find(here, accept_lengths=(1.0, 1.5, 1.8, 2.0), sigmas=(0.0, 0.0, 0.0), jitter=0.0, drafted=True):
    """The probe of a policy with these estimates, whose drafter has just drafted, or never."""
    budget = ProbeBudget(1.0, 4, 64)
    if drafted:
        budget.drafted()
    acceptance = SimpleNamespace(accept_lengths=accept_lengths, accept_length_uncertainty=lambda: (0.0,) * 4)
    latency = SimpleNamespace(uncertainty=lambda batch, kv_tokens: (0.0, *sigmas), jitter=jitter)  # of OFF first
    return find_probe(here, ARMS, acceptance, latency, budget)


def at(current, seconds=(1.0, 1.0, 1.0), goodput=(1.0, 1.0, 1.0), reachable=3, batch=4):
    return LoadEstimates(Load(batch, 100 * batch), current, reachable, seconds, goodput, current)


@pytest.mark.parametrize(
    ("current", "seconds", "arm", "tau", "spread", "sigma", "optimism", "hope"),
    [
        # tau 2 of spread 0.4, a fifth of it: at best a fifth more by a latency that is known
        (1, (1.0, 1.0, 1.6), 2, 2.0, 0.4, 0.0, 1.0, 2.0 / 1.6 * 1.2),
        # three fifths and four fifths of a quarter
        (1, (1.0, 1.0, 1.6), 2, 2.0, 0.4, 0.15, 2.0, 2.0 / 1.6 * (1 + 2 * 0.25)),
        # not cheaper than the one in use, however vague its latency, unless it is estimated to be
        (1, (1.0, 1.2, 1.5), 2, 2.0, 0.4, 0.9, 1.0, (2.0 + 0.4) / 1.2),
        (1, (1.0, 1.2, 1.1), 2, 2.0, 0.4, 0.9, 1.0, (2.0 + 0.4) / 1.1),
        # of a shorter draft only the latency is unknown
        (2, (1.0, 0.6, 1.0), 1, 1.5, 0.3, 0.2, 1.0, 1.5 / 0.6 * 1.2),
    ],
)
def test_an_arm_may_be_as_good_as_its_estimates_may_be_wrong(
    monkeypatch, current, seconds, arm, tau, spread, sigma, optimism, hope
):
    monkeypatch.setattr(prober, "OPTIMISM", optimism)
    assert at_best(at(current, seconds), arm, tau, spread, sigma) == pytest.approx(hope)


def test_what_may_be_a_hundredth_better_is_probed_nearest_first_as_far_as_it_may():
    assert find(at(0)).choice == 1, "goodput of 1.5 and 2 against 1"
    assert find(at(1, goodput=(1.0, 1.5, 2.0))).choice == 2, "the last that can be reached"
    assert find(at(1, goodput=(1.0, 1.5, 2.0), reachable=2)) is None
    assert find(at(0), (1.0, 1.009, 1.0, 1.0)) is None
    assert find(at(0), (1.0, 1.011, 1.0, 1.0))[:2] == (1, 2)


@pytest.mark.parametrize(("batch", "steps"), [(1, 8), (3, 3), (4, 2), (5, 2), (8, 1), (9, 1), (300, 1)])
def test_a_probe_lasts_until_eight_drafts_were_judged(batch, steps):
    assert find(at(0, batch=batch)).steps == steps


@pytest.mark.parametrize(("jitter", "steps"), [(0.0, 3), (0.04, 5), (0.06, 10), (0.3, 13)])
def test_where_the_latency_is_vague_it_lasts_until_that_is_known(jitter, steps):
    assert find(at(0, batch=64), sigmas=(0.0, 0.03, 0.0), jitter=jitter).steps == steps


def test_a_probe_costs_what_it_gives_up():
    found = find(at(0, goodput=(1.0, 0.9, 0.1), batch=8))
    assert found[:2] == (1, 1) and found.price == pytest.approx(1 * 0.1 + 0.05)
    assert find(at(0, goodput=(1.0, 0.1, 0.1), batch=1)) is None, "more than may be spent"


@pytest.mark.parametrize(("second", "reachable", "looks"), [(1.9, 3, True), (1.99, 3, False), (1.9, 1, False)])
def test_an_unused_drafter_is_probed_where_a_perfect_one_would_pay(second, reachable, looks):
    """Two tokens in `second` seconds against one in one; a hundredth more is not worth it."""
    hopeless = (1.0,) * 4
    here = at(0, seconds=(1.0, second, 2.0), goodput=(1.0, 0.9, 0.5), reachable=reachable)
    found = find(here, hopeless, drafted=False)
    assert (found and (found.choice, found.subject)) == ((1, "unused drafter") if looks else None)
    twice = here._replace(seconds=(0.5, second / 2, 1.0), goodput=(2.0, 1.8, 1.0))
    assert find(twice, hopeless, drafted=False) == found, "whatever the seconds are"
    assert find(here, hopeless) is None, "it drafted a moment ago"
