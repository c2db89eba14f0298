"""The GPU benchmark's test of two samples can fail."""

import random

from benchmarks.gpu.chi_square import chi_square, compare


def drawn(count, weights, seed):
    return [[token] for token in random.Random(seed).choices(range(len(weights)), weights, k=count)]


def test_samples_of_one_distribution_pass_and_others_do_not():
    weights = [8, 4, 2, 1, 1, 0.01]
    same = chi_square(drawn(4000, weights, 1), drawn(2000, weights, 2))
    assert same["p"] > 1e-3 and same["freedom"] == 5  # the rare token is in a cell of its own kind
    assert chi_square(drawn(4000, weights, 1), drawn(4000, [8, 4, 2, 2, 1, 0.01], 2))["p"] < 1e-6


def test_outputs_whose_tokens_hang_together_otherwise_are_told_apart():
    draws = random.Random(0)
    alone, other = ([[draws.randrange(4), draws.randrange(4), 7] for _ in range(4000)] for _ in range(2))
    hanging = [[x, x if draws.random() < 0.15 else draws.randrange(4), 7] for x, _, _ in other]
    assert compare(alone, other)["p"] > 1e-3
    found = compare(alone, hanging)
    assert found["p"] < 1e-6 and all(found["tests"][f"token {i}"]["p"] > 1e-3 for i in range(3))
