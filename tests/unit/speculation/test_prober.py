"""The probe budget: never more than its share, intervals double, news restart them. Then what is worth a probe."""

from dataclasses import dataclass
from itertools import pairwise

import pytest

from verl_tlt.speculation.prober import LoadEstimates, ProbeBudget, Prober, ProbeRun
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


def test_subjects_are_apart_and_news_restart_them():
    budget = ProbeBudget(1.0, 4, 64)
    for _ in range(3):
        budget.spend("a", 0.0)
    assert not budget.due("a") and budget.due("b")
    budget.clear()
    assert budget.due("a")


def test_too_dear_is_refused_and_costs_nothing():
    budget = ProbeBudget(0.01, 4, 64)
    assert not budget.spend("arm", 5.0)
    assert budget.due("arm") and budget.spend("arm", 1.0), "the allowance is whole"


ARMS = (0, 1, 3)


@dataclass
class Beliefs:
    """What an acceptance estimate and a latency model would say; OFF's figures come first in the latter's."""

    tau: tuple[float, ...] = (1.0, 1.5, 1.8, 2.0)
    spread: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    sigmas: tuple[float, ...] = (0.0, 0.0, 0.0)
    jitter: float = 0.0

    def accept_lengths(self):
        return self.tau

    def accept_length_uncertainty(self):
        return self.spread

    def uncertainty(self, batch, kv_tokens):
        return (0.0, *self.sigmas)


def prober(beliefs, optimism=1.0, seen=True):
    """One that has just seen its drafter, or never."""
    made = Prober(ARMS, beliefs, beliefs, ProbeBudget(1.0, 4, 64), optimism)
    if seen:
        made.drafted()
    return made


def at(current, seconds=(1.0, 1.0, 1.0), goodput=(1.0, 1.0, 1.0), reachable=3, batch=4):
    return LoadEstimates(Load(batch, 100 * batch), current, reachable, seconds, goodput, current)


def test_a_longer_draft_is_hoped_to_be_as_good_as_its_estimates_may_be_wrong():
    """tau 2 of spread 0.4, a fifth of it: at best a fifth more by a latency that is known."""
    beliefs = Beliefs(spread=(0.0, 0.3, 0.4, 0.4))
    (hope,) = prober(beliefs)._at_best(at(1, seconds=(1.0, 1.0, 1.6)), [2], beliefs.sigmas)
    assert hope == pytest.approx(2.0 / 1.6 * 1.2)
    (hope,) = prober(beliefs, optimism=2.0)._at_best(at(1, seconds=(1.0, 1.0, 1.6)), [2], (0.0, 0.0, 0.15))
    assert hope == pytest.approx(2.0 / 1.6 * (1 + 2 * 0.25)), "three fifths and four fifths of a quarter"


def test_a_longer_draft_is_not_hoped_to_be_cheaper_than_the_one_in_use():
    beliefs = Beliefs(spread=(0.0, 0.3, 0.4, 0.4), sigmas=(0.0, 0.0, 0.9))
    (hope,) = prober(beliefs)._at_best(at(1, seconds=(1.0, 1.2, 1.5)), [2], beliefs.sigmas)
    assert hope == pytest.approx((2.0 + 0.4) / 1.2)
    (hope,) = prober(beliefs)._at_best(at(1, seconds=(1.0, 1.2, 1.1)), [2], beliefs.sigmas)
    assert hope == pytest.approx((2.0 + 0.4) / 1.1), "unless it is believed to be"


def test_of_a_shorter_draft_only_the_latency_is_unknown():
    beliefs = Beliefs(spread=(0.0, 0.3, 0.4, 0.4), sigmas=(0.0, 0.2, 0.0))
    (hope,) = prober(beliefs)._at_best(at(2, seconds=(1.0, 0.6, 1.0)), [1], beliefs.sigmas)
    assert hope == pytest.approx(1.5 / 0.6 * 1.2)


def test_what_may_be_a_hundredth_better_is_probed_nearest_first_as_far_as_it_may():
    good = Beliefs()  # goodput of 1.5 and 2 against 1
    assert prober(good).find(at(0)).run.arm == 1
    assert prober(good).find(at(1, goodput=(1.0, 1.5, 2.0))).run.arm == 2, "the last that can be reached"
    assert prober(good).find(at(1, goodput=(1.0, 1.5, 2.0), reachable=2)) is None
    for tau, found in ((1.009, None), (1.011, ProbeRun(1, 2))):
        maybe = prober(Beliefs(tau=(1.0, tau, 1.0, 1.0))).find(at(0))
        assert (maybe and maybe.run) == found


@pytest.mark.parametrize(("batch", "steps"), [(1, 8), (3, 3), (4, 2), (5, 2), (8, 1), (9, 1), (300, 1)])
def test_a_probe_lasts_until_eight_drafts_were_judged(batch, steps):
    assert prober(Beliefs()).find(at(0, batch=batch)).run.steps == steps


@pytest.mark.parametrize(("jitter", "steps"), [(0.0, 3), (0.04, 5), (0.06, 10), (0.3, 13)])
def test_where_the_latency_is_vague_it_lasts_until_that_is_known(jitter, steps):
    vague = Beliefs(sigmas=(0.0, 0.03, 0.0), jitter=jitter)
    assert prober(vague).find(at(0, batch=64)).run.steps == steps


def test_a_probe_costs_what_it_gives_up():
    found = prober(Beliefs()).find(at(0, goodput=(1.0, 0.9, 0.1), batch=8))
    assert found.run == ProbeRun(1, 1) and found.price == pytest.approx(1 * 0.1 + 0.05)
    assert prober(Beliefs()).find(at(0, goodput=(1.0, 0.1, 0.1), batch=1)) is None, "more than may be spent"


@pytest.mark.parametrize(("second", "reachable", "looks"), [(1.9, 3, True), (1.99, 3, False), (1.9, 1, False)])
def test_a_drafter_that_was_not_looked_at_is_where_a_perfect_one_would_pay(second, reachable, looks):
    """Two tokens in `second` seconds against one in one; a hundredth more is not worth it."""
    hopeless = Beliefs(tau=(1.0, 1.0, 1.0, 1.0))
    here = at(0, seconds=(1.0, second, 2.0), goodput=(1.0, 0.9, 0.5), reachable=reachable)
    found = prober(hopeless, seen=False).find(here)
    assert (found and (found.run.arm, found.subject)) == ((1, "unused drafter") if looks else None)
    twice = here._replace(seconds=(0.5, second / 2, 1.0), goodput=(2.0, 1.8, 1.0))
    assert prober(hopeless, seen=False).find(twice) == found, "whatever the seconds are"
    assert prober(hopeless).find(here) is None, "it was seen a moment ago"
