"""What the scripts of rejection kernels share: a target, a drafter, and whether drawn tokens are the target's."""

from itertools import product

import numpy as np
import torch
from scipy.stats import chisquare

V, K, REQUESTS = 5, 2, 800


def draw_models(generator):
    """(target [K + 1, V], drafter [K, V]): distributions by position, whatever came before."""
    target = torch.rand(K + 1, V, generator=generator).add(0.2)
    drafter = torch.rand(K, V, generator=generator).add(0.1)
    return target / target.sum(-1, keepdim=True), drafter / drafter.sum(-1, keepdim=True)


def draw_drafts(drafter, generator, requests=REQUESTS):
    """Tokens drawn from `drafter`, [requests, K]."""
    return torch.stack([row.multinomial(requests, True, generator=generator) for row in drafter], 1)


def p_value(target, found, generator):
    """Of the first two tokens of each request, chi-square against the target.

    Args:
        found: [requests, K + 1], negative from where a step ended early: the next one's is drawn here.
    """
    requests = len(found)
    rest = target[1].multinomial(requests, True, generator=generator)
    second = torch.where(found[:, 1] < 0, rest, found[:, 1].long())
    counts = np.bincount((found[:, 0].long() * V + second).numpy(), minlength=V * V)
    expected = np.array([float(target[0, a] * target[1, b]) for a, b in product(range(V), repeat=2)])
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    return float(chisquare(counts[possible], expected[possible] / expected.sum() * requests).pvalue)
