"""Whether a cold start begins, how long it may take, and when it has enough: numbers in, a reason out."""

import json
from pathlib import Path

import numpy as np
import pytest

from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.trainer.cold_start import FLAT, LONGEST_S, PORTIONS, SHORTEST_S, STEPS, ColdStart
from verl_tlt.trainer.drafter_update import DrafterUpdate

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def first_position(acceptance):
    """A share saved that is simple: half of what the first position is accepted."""
    return 0.5 * acceptance[0] if acceptance else 0.0


def started(longest_s=None, steps_left=1000, step_s=100.0, rollout_s=60.0, bubble_s=0.0, saving=first_position):
    """After steps of which the first, in which everything is used for the first time, took longer."""
    cold = ColdStart(True, longest_s)
    for extra_s in (400.0, 0.0, 10.0)[: STEPS + 1]:
        cold.stepped(step_s + extra_s, rollout_s, bubble_s)
    return cold, cold.begin(steps_left, saving)


def portions(cold, seconds, saving, *acceptances):
    """Run it with these verdicts; returns the portions that it took, and why it ended (empty: its time was over)."""
    for n, acceptance in enumerate(acceptances, 2):  # a portion is judged in the next one
        cold.trained(True, DrafterUpdate(tau={"candidate": 1.5}, acceptance=acceptance))
        if why := cold.enough(n * cold.portion_s, seconds - n * cold.portion_s, saving):
            return n, why
    return n, ""


@pytest.mark.parametrize(
    ("steps_left", "step_s", "seconds"),
    [(150, 100.0, 150.0), (10_000, 100.0, LONGEST_S), (10, 100.0, SHORTEST_S), (9, 100.0, 0.0), (10, 15.0, 0.0)],
)
def test_it_takes_a_hundredth_of_the_rest_of_the_run_and_none_where_that_is_little(steps_left, step_s, seconds):
    assert started(None, steps_left, step_s)[1] == pytest.approx(seconds)


def test_where_bubbles_teach_as_much_for_nothing_it_does_not_begin():
    """The best drafter saves 0.4 of a rollout of 60 seconds, 24 s, in each step by which its training comes earlier."""
    assert started(bubble_s=23.0)[1] > 0.0 and started(bubble_s=25.0)[1] == 0.0
    assert started(bubble_s=0.0)[1] > 0.0, "no bubble teaches anything"
    assert started(saving=lambda acceptance: 0.0)[1] == 0.0, "nobody knows what it saves"
    assert started(40.0, bubble_s=25.0)[1] == 40.0, "somebody has said how long"


def test_scores_that_take_much_of_a_portion_make_the_next_one_longer():
    cold, seconds = started(40.0)
    cold.scored(1.0)
    assert cold.portion_s == seconds / PORTIONS == 8.0
    cold.scored(3.0)
    assert cold.portion_s == 12.0
    cold.scored(0.0)
    assert cold.portion_s == 12.0, "a portion may have had nothing to score"


def test_it_goes_on_while_what_it_is_expected_to_add_saves_more_than_it_takes():
    """A portion adds half of what those before it did: 0.1 of acceptance, so 3 s of a rollout of 60, less each time."""
    assert portions(*started(40.0, steps_left=10), first_position, [0.2], [0.4], [0.6])[1] == ""
    assert portions(*started(40.0, steps_left=2), first_position, [0.2])[0] == 2, "in few steps it is not brought back"
    assert portions(*started(40.0, 10, bubble_s=12.0), first_position, [0.2])[0] == 2, "bubbles bring it soon"


def test_one_portion_without_a_rise_may_be_chance_and_two_are_not():
    taken, why = portions(*started(40.0, 100), first_position, [0.3], [0.3], [0.3], [0.3])
    assert taken == 2 + FLAT and "15% of a rollout" in why


def test_where_nobody_knows_what_drafting_saves_it_ends_with_the_first_verdict():
    assert portions(*started(40.0), lambda acceptance: 0.0, [0.5])[0] == 2


def test_it_says_what_it_expects_in_the_metrics_of_its_step_alone():
    cold, seconds = started(40.0, bubble_s=8.0)
    portions(cold, seconds, first_position, [0.4])
    cold.ended(40.0, first_position)
    assert cold.news == {"tlt/cold_start_expected_s": pytest.approx(0.2 * 60.0 * 5), "tlt/cold_start_steps": 5}
    cold.stepped(100.0, 60.0, 8.0)
    assert cold.news == {}


# ---------------------------------------------------------------------- recorded runs


def recorded(file):
    """The turn of a run without a drafter, and the cold start that it was told to have."""
    turns = json.loads((RESULTS / f"{file}.json").read_text())["turns"]
    steps = [step for turn in turns if turn["arm"] == "tlt-fresh" for step in turn["steps"]]
    return steps, next(step for step in steps if step["cold_start_s"])


def measured_saving(acceptance):
    """The share of a rollout that drafts saved in the recorded steps of both loads, by their accept length."""
    shares = {1.0: 0.0}
    for steps, cold in map(recorded, ("cold_start", "cold_start_small")):
        for step in steps[cold["step"] - 1 :]:
            if step["saved_s"]:
                shares[step["accept_length"]] = step["saved_s"] / (step["rollout_s"] + step["saved_s"])
    length = expected_accept_lengths(acceptance, 7)[-1] if acceptance else 1.0
    share = float(np.interp(length, sorted(shares), [shares[at] for at in sorted(shares)]))
    return share if share > 0.1 else 0.0  # `decision.UNTRIED`


def even(length):
    """Conditional acceptance, the same at every position, that gives this accept length at K=7."""
    ps = np.linspace(0.0, 0.99, 500)
    return [float(np.interp(length, [(1 - p**8) / (1 - p) for p in ps], ps))] * 7


def begun(file, longest_s, steps_left=None):
    steps, cold = recorded(file)
    before = [step for step in steps if step["step"] < cold["step"]]
    rule = ColdStart(True, longest_s)
    for step in [before[0], *before]:  # the first of a turn was not recorded
        rule.stepped(step["step_s"], step["rollout_s"])
    left = steps[-1]["step"] - cold["step"] if steps_left is None else steps_left
    return rule, rule.begin(left, measured_saving)


@pytest.mark.parametrize("steps_left", [10, 21])
def test_with_24_responses_a_step_it_does_not_begin_by_itself_in_a_short_run(steps_left):
    assert begun("cold_start_small", None, steps_left)[1] == 0.0


def test_with_24_responses_a_step_one_that_was_asked_for_ends_at_its_first_verdict():
    """On other prompts' responses the drafter came to an accept length of 1.36 in the rollout after it."""
    steps, cold = recorded("cold_start_small")
    after = next(step["accept_length"] for step in steps if step["step"] == cold["step"] + 1)
    taken, why = portions(*begun("cold_start_small", 60.0), measured_saving, even(after))
    assert taken == 2 and "drafting saves 0% of a rollout" in why


def test_with_96_responses_a_step_it_goes_on_until_drafting_saves_a_third():
    """With the accept lengths of a random head of the toy while it learns (drafter_learning.json)."""
    learning = json.loads((RESULTS / "drafter_learning.json").read_text())["corpora"]["toy"]["base"]["accept_length"]
    taken, why = portions(*begun("cold_start", 60.0), measured_saving, *map(even, learning))
    assert taken >= 4 and measured_saving(even(learning[taken - 2])) > 1 / 3, why
