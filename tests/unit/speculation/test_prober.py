"""The probe budget: never more than its share, intervals double, news restart them."""

from itertools import pairwise

from verl_tlt.speculation.prober import ProbeBudget


def test_spending_is_bounded_by_the_share():
    budget = ProbeBudget(0.01, 1, 1)
    for _ in range(10_000):
        budget.step()
        budget.spend("arm", 0.5)
    assert budget.spent <= 0.01 * 10_000 + 1.0
    assert budget.spent > 0.9 * 0.01 * 10_000


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
    assert budget.spent == 0.0 and budget.due("arm")
