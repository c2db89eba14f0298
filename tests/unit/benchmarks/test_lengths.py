"""Ratios of whole runs do not depend on which lengths each arm happened to sample."""

import pytest

pytest.importorskip("verl")

from benchmarks.e2e.lengths import Sampled, adjusted
from verl_tlt.commands.compare.record import Step

LENGTHS = [(10, 20, 600), (10, 20, 30), (40, 50, 60), (5, 5, 900), (70, 10, 10)]
REST_S_PER_TOKEN = 0.05


def expected(arm, lengths):
    """A rollout ends with its longest response; with TLT a token takes half as long."""
    return max(lengths) * (0.1 if arm == "stock" else 0.05)


def arm_of(name, lengths, times=1.0):
    """Steps that take so many times what is expected for their lengths."""
    steps = []
    for number, each in enumerate(lengths):
        rollout_s, tokens = times * expected(name, each), float(sum(each))
        step = Step(0, number, rollout_s + REST_S_PER_TOKEN * tokens, rollout_s, tokens, reward=0.5)
        steps.append(Sampled(step, each))
    return steps


def test_luck_with_lengths_is_no_speed():
    same = adjusted({"stock": arm_of("stock", LENGTHS), "tlt": arm_of("tlt", LENGTHS)}, expected)["tlt"]
    lucky = adjusted({"stock": arm_of("stock", LENGTHS), "tlt": arm_of("tlt", [(1, 2, 3)] * 5)}, expected)["tlt"]
    assert same["rollout"] == lucky["rollout"] == [2.0, 2.0, 2.0]
    assert 1.0 < same["step"][0] < 2.0 and 1.0 < lucky["step"][0] < 2.0


def test_what_took_longer_than_expected_counts():
    slower = adjusted({"stock": arm_of("stock", LENGTHS), "tlt": arm_of("tlt", LENGTHS[::-1], times=1.6)}, expected)
    assert slower["tlt"]["rollout"] == pytest.approx([1.25] * 3)
