"""Run by a test in a process of its own: vLLM's Triton rejection kernels, which GPUs run, under Triton's interpreter.

Prints {case: p-value} as JSON: of the first two tokens of many requests against the target, two drafts each.
"""

import importlib
import json
import os
from itertools import product
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language
import vllm.triton_utils
from scipy.stats import chisquare

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # vLLM has a stand-in where there is no GPU
rejection_sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")

V, K, REQUESTS = 5, 2, 800


def draw_models(generator):
    """(target [K + 1, V], drafter [K, V]): distributions by position, whatever came before."""
    target = torch.rand(K + 1, V, generator=generator).add(0.2)
    drafter = torch.rand(K, V, generator=generator).add(0.1)
    return target / target.sum(-1, keepdim=True), drafter / drafter.sum(-1, keepdim=True)


def p_value(target, found, generator):
    """Chi-square of the first two tokens of each request against the target.

    Args:
        found: [REQUESTS, K + 1], negative from where a step ended early: the next one's is drawn here.
    """
    rest = target[1].multinomial(REQUESTS, True, generator=generator)
    second = torch.where(found[:, 1] < 0, rest, found[:, 1].long())
    counts = np.bincount((found[:, 0].long() * V + second).numpy(), minlength=V * V)
    expected = np.array([float(target[0, a] * target[1, b]) for a, b in product(range(V), repeat=2)])
    return float(chisquare(counts, expected / expected.sum() * REQUESTS).pvalue)


def outputs(target, drafter, probs, generator):
    """What the kernels emit, [REQUESTS, K + 1], -1 behind a rejected draft.

    Args:
        target: [K + 1, V] by position.
        drafter: [K, V] that drafts are drawn from.
        probs: [REQUESTS * K, V] that they are verified with; None: as certain.
        generator: of the drafts.
    """
    drafts = torch.stack([row.multinomial(REQUESTS, True, generator=generator) for row in drafter], 1)
    logits = target[:K].log().repeat(REQUESTS, 1)  # [REQUESTS * K, V]
    bonus = target[K].multinomial(REQUESTS, True, generator=generator).int()[:, None]
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(REQUESTS), generators={}
    )  # fmt: skip
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32) * K
    return rejection_sampler.rejection_sample(
        drafts.reshape(-1).int(), [K] * REQUESTS, K, ends, probs, logits, bonus, metadata
    )


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    target, drafter = draw_models(generator)
    token_0 = torch.eye(V)[0].expand(K, V)  # what a drafter of NaN draws
    sound, nan = drafter.repeat(REQUESTS, 1), torch.full((REQUESTS * K, V), float("nan"))
    cases = {
        "sound": (drafter, sound),
        "certain": (drafter, None),
        "NaN": (token_0, nan),
        "off by a half": (drafter, sound / 2),
    }
    found = {name: p_value(target, outputs(target, *case, generator), generator) for name, case in cases.items()}
    print(json.dumps(found))
