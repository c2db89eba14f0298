"""How often a stage without a moving bar says where it is."""

import itertools
import math

from verl_tlt.commands.warmup.engine import FIRST_S, Lines


def told(shares):
    """(second, share) of each line of a stage whose share at second i is shares[i]."""
    lines = Lines(0.0)
    return [(second, share) for second, share in enumerate(shares) if lines.due(share, float(second))]


def test_every_tenth_has_a_line():
    assert [share for _, share in told([i / 100 for i in range(101)])] == [i / 10 for i in range(1, 11)]


def test_a_jump_over_several_tenths_is_one_line():
    assert told([0.0, 0.05, 0.73, 0.74, 1.0]) == [(2, 0.73), (4, 1.0)]


def test_a_stage_that_stands_still_is_heard_of_but_less_and_less_often():
    day = told([0.0] * 86_400)
    assert day[0][0] == FIRST_S
    waits = [b - a for (a, _), (b, _) in itertools.pairwise(day)]
    assert waits == sorted(waits) and len(day) <= math.log2(86_400 / FIRST_S) + 1


def test_a_slow_stage_has_a_bounded_number_of_lines():
    assert len(told([i / 86_400 for i in range(86_401)])) <= 10 + math.log2(86_400 / FIRST_S)
