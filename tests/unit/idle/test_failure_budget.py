"""How often a replica's training may fail before it is left alone, and for how long it is."""

from verl_tlt.idle.failure_budget import MAX_FAILURES, FailureBudget
from verl_tlt.speculation.decision import FIRST_WAIT, LONGEST_WAIT


def tried(budget, until):
    """Steps in which a replica trains and fails."""
    found = []
    for step in range(1, until):
        if budget.allows("a", step):
            found.append(step)
            budget.failed("a", step)
    return found


def test_failure_budget_pauses_then_gives_up_per_replica():
    budget = FailureBudget()
    assert budget.failed("a", step=1) == 0
    assert [budget.allows("a", s) for s in (1, 2, 3)] == [False, False, True]
    assert budget.allows("b", 1)
    assert budget.failed("a", step=3) == 0
    assert [budget.allows("a", s) for s in (4, 5, 6)] == [False, False, True]
    assert budget.failed("a", step=6) == FIRST_WAIT
    assert budget.off == {"a"} and not budget.allows("a", 6 + FIRST_WAIT)


def test_one_that_was_given_up_is_tried_again_after_rising_waits():
    """As speculation is, and as seldom in the end."""
    steps = tried(FailureBudget(), 300)
    waits = [later - step - 1 for step, later in zip(steps[MAX_FAILURES - 1 :], steps[MAX_FAILURES:], strict=False)]
    assert waits[:5] == [FIRST_WAIT, 16, 32, LONGEST_WAIT, LONGEST_WAIT]


def test_a_success_breaks_the_row():
    budget = FailureBudget()
    budget.failed("a", step=1)
    budget.failed("a", step=3)
    assert not budget.succeeded("a"), "it had not been given up"
    assert budget.allows("a", 4)
    assert budget.failed("a", step=4) == 0
    assert not budget.off


def test_a_success_brings_back_one_that_was_given_up():
    budget = FailureBudget()
    tried(budget, 8)
    assert budget.off == {"a"} and budget.succeeded("a")
    assert not budget.off and budget.allows("a", 8) and budget.failed("a", 8) == 0
