"""Lengths with a long tail, and how much of the tokens falls on it."""

import numpy as np


def long_tailed(count, rng, median=300, sigma=1.0):
    return [max(8, int(rng.lognormvariate(np.log(median), sigma))) for _ in range(count)]


def share_by_decile(lengths, tokens):
    """Share of `tokens` [N] that falls on each tenth of the sequences, from the shortest to the longest."""
    tokens = np.asarray(tokens, dtype=float)[np.argsort(lengths, kind="stable")]
    return np.array([part.sum() for part in np.array_split(tokens, 10)]) / tokens.sum()
