"""How long a cold start may take, and when it has enough: numbers in, a reason out."""

import pytest

from verl_tlt.trainer.cold_start import FLAT, LONGEST_S, PAYS_WITHIN, PORTIONS, SHORTEST_S, STEPS, ColdStart


def started(longest_s=None, steps_left=1000, step_s=100.0, rollout_s=60.0):
    cold = ColdStart(True, longest_s)
    for _ in range(STEPS):
        cold.stepped(step_s, rollout_s)
    return cold, cold.begin(steps_left)


@pytest.mark.parametrize(
    ("steps_left", "step_s", "seconds"),
    [(150, 100.0, 150.0), (10_000, 100.0, LONGEST_S), (10, 100.0, SHORTEST_S), (9, 100.0, 0.0), (10, 15.0, 0.0)],
)
def test_it_takes_a_hundredth_of_the_rest_of_the_run_and_none_where_that_is_little(steps_left, step_s, seconds):
    assert started(None, steps_left, step_s)[1] == pytest.approx(seconds)


def test_the_first_step_says_least_about_the_others():
    cold = ColdStart(True, None)
    for step_s in (500.0, 100.0, 110.0):
        cold.stepped(step_s, 60.0)
    assert cold.begin(100) == pytest.approx(100.0)


def test_it_takes_as_long_as_was_said_however_short_the_run_is():
    cold, seconds = started(2.0, steps_left=1, step_s=1.0)
    assert seconds == 2.0 and cold.portion_s == 2.0 / PORTIONS


def test_it_waits_for_hidden_states_and_comes_once():
    cold = ColdStart(True, None)
    for _ in range(STEPS):
        assert cold.wanted and not cold.due()
        cold.stepped(100.0, 60.0)
    assert cold.due()
    cold.begin(1000)
    assert not cold.due() and not cold.wanted


@pytest.mark.parametrize(("wanted", "longest_s"), [(False, None), (False, 60.0), (True, 0.0)])
def test_a_run_that_has_a_drafter_or_wants_none_has_no_cold_start(wanted, longest_s):
    cold = ColdStart(wanted, longest_s)
    for _ in range(STEPS):
        cold.stepped(100.0, 60.0)
    assert not cold.wanted and not cold.due()


def test_it_ends_once_portions_in_a_row_taught_nothing():
    """Workers that did not come as far as a step, as on a machine with much else to do, or merges that failed."""
    cold, _ = started()
    for merged in (False, True, *[False] * FLAT):
        assert not cold.enough()
        cold.trained(merged)
    assert "nothing was trained and merged" in cold.enough()


def test_it_ends_once_portions_in_a_row_did_not_raise_the_accept_length():
    cold, _ = started()
    for rose in (True, False, True, *[False] * FLAT):
        assert not cold.enough()
        cold.judged(rose, 0.0)
    assert "does not rise" in cold.enough()


def test_scores_that_take_much_of_a_portion_make_the_next_one_longer():
    cold, seconds = started(40.0)
    cold.scored(1.0)
    assert cold.portion_s == seconds / PORTIONS == 8.0
    cold.scored(3.0)
    assert cold.portion_s == 12.0
    cold.scored(0.0)
    assert cold.portion_s == 12.0, "a portion may have had nothing to score"


def test_while_drafting_does_not_pay_yet_it_goes_on_as_long_as_acceptance_rises():
    cold, _ = started()
    for _ in range(100):
        cold.judged(True, 0.0)
        assert not cold.enough()


@pytest.mark.parametrize("steps_left", [1000, 4])
def test_once_drafting_pays_a_portion_must_bring_back_its_time_within_some_steps(steps_left):
    """The first one that pays makes up for all before it; of the others it counts what each has added."""
    cold, _ = started(40.0, steps_left, rollout_s=60.0)
    least = cold.portion_s / 60.0 / min(PAYS_WITHIN, steps_left)  # of a rollout
    cold.judged(True, 0.2)
    assert not cold.enough()
    cold.judged(True, 0.2 + 1.1 * least)
    assert not cold.enough()
    cold.judged(True, 0.2 + 2.0 * least)
    assert "pays" in cold.enough()


def test_a_drafter_that_pays_and_got_no_better_is_enough():
    cold, _ = started()
    cold.judged(True, 0.3)
    cold.judged(False, 0.3)
    assert "pays" in cold.enough()
