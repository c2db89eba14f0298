"""Whole runs whose arms sampled other lengths: adjusted ratios, and training along against a frozen drafter."""

import json
from dataclasses import replace

import pytest

from benchmarks.e2e.lengths import Sampled, adjusted, sampled
from verl_tlt.commands.compare.plan import STOCK, TLT
from verl_tlt.commands.compare.record import Step

STEP = Step(turn=0, step=2, step_s=40.0, rollout_s=30.0, tokens=100.0, reward=0.5)
SHORT, LONG = (10,) * 24, (*(10,) * 23, 500)


def predicted(arm, lengths):
    """As long as the longest response, half of that with drafts."""
    return max(lengths) * (0.5 if arm == TLT else 1.0)


def steps(rollout_s, lengths, count=8, rest_s=10.0):
    """Steps of an arm whose rollouts take so many seconds a token of the longest response."""
    found = []
    for n in range(count):
        of = lengths(n)
        took = rollout_s * max(of) * (1 + 0.02 * (n % 3))
        found.append(Sampled(replace(STEP, step=n + 2, rollout_s=took, step_s=took + rest_s * sum(of) / 240), of))
    return found


def test_an_arm_that_sampled_the_stragglers_is_not_the_slower_for_it():
    """It is twice as fast at equal lengths, and had a straggler in every step; stock had one in every other."""
    found = adjusted(
        {STOCK: steps(0.1, lambda n: LONG if n % 2 else SHORT), TLT: steps(0.05, lambda n: LONG)}, predicted
    )
    rollout, step = found[TLT]["rollout"], found[TLT]["step"]
    assert rollout == pytest.approx([2.0, 2.0, 2.0], rel=0.03)
    assert 1.0 < step[0] < rollout[0], "the rest of a step takes as long"


def test_the_rest_of_a_step_goes_with_its_tokens():
    more = (20,) * 24
    found = adjusted({STOCK: steps(0.1, lambda n: SHORT), TLT: steps(0.1, lambda n: more)}, lambda arm, of: max(of))
    assert found[TLT]["step"] == pytest.approx([1.0, 1.0, 1.0], rel=0.03)


def test_lengths_are_counted_in_what_verl_wrote_of_the_step(tmp_path):
    rows = [{"output": "a b c"}, {"output": "a " * 90}]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (one,) = sampled([STEP, replace(STEP, step=3)], tmp_path, lambda text: len(text.split()), longest=50)
    assert one.step is STEP and one.lengths == (4, 50), "with the token that ended it, and no more than there may be"
