"""How often a replica's training may fail before it is left alone."""

from verl_tlt.idle.failure_budget import FailureBudget


def test_failure_budget_pauses_then_gives_up_per_replica():
    budget = FailureBudget()
    assert not budget.failed("a", step=1)
    assert [budget.allows("a", s) for s in (1, 2, 3)] == [False, False, True]
    assert budget.allows("b", 1)
    assert not budget.failed("a", step=3)
    assert [budget.allows("a", s) for s in (4, 5, 6)] == [False, False, True]
    assert budget.failed("a", step=6)
    assert budget.off == {"a"}
    budget.succeeded("a")
    assert not budget.allows("a", 1000)
    assert not budget.failed("a", step=7)  # said once


def test_a_success_breaks_the_row():
    budget = FailureBudget()
    budget.failed("a", step=1)
    budget.failed("a", step=3)
    budget.succeeded("a")
    assert budget.allows("a", 4)
    assert not budget.failed("a", step=4)
    assert not budget.off
