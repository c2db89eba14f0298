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

from verl_tlt.vllm_worker.draft_probabilities import BrokenDrafts

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # vLLM has a stand-in where there is no GPU
rejection_sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")

V, K, REQUESTS = 5, 2, 800


def outputs(drafter, probs, generator):
    """The first two tokens of each request, [REQUESTS, 2]; position i is drawn from `TARGET[i]` whatever came before.

    Args:
        drafter: [K, V] that drafts are drawn from.
        probs: [REQUESTS * K, V] that they are verified with; None: as certain.
        generator: of the drafts.
    """
    drafts = torch.stack([row.multinomial(REQUESTS, True, generator=generator) for row in drafter], 1)  # [REQUESTS, K]
    logits = TARGET[:K].log().repeat(REQUESTS, 1)  # [REQUESTS * K, V]
    bonus = TARGET[K].multinomial(REQUESTS, True, generator=generator).int()[:, None]
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(REQUESTS), generators={}
    )  # fmt: skip
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32) * K
    found = rejection_sampler.rejection_sample(
        drafts.reshape(-1).int(), [K] * REQUESTS, K, ends, probs, logits, bonus, metadata
    )
    rest = TARGET[1].multinomial(REQUESTS, True, generator=generator)  # the next step's, where this one ended early
    return torch.stack([found[:, 0].long(), torch.where(found[:, 1] < 0, rest, found[:, 1].long())], 1)


def p_value(tokens):
    counts = np.bincount((tokens[:, 0] * V + tokens[:, 1]).numpy(), minlength=V * V)
    expected = [float(TARGET[0, a] * TARGET[1, b]) for a, b in product(range(V), repeat=2)]
    return float(chisquare(counts, np.array(expected) / sum(expected) * REQUESTS).pvalue)


def dropped(probs):
    """As our worker hands them on."""
    runner = SimpleNamespace(
        device=torch.device("cpu"), sample_tokens=None, _get_spec_decode_draft_probs=lambda _: probs
    )
    BrokenDrafts(runner, lambda: None)
    return runner._get_spec_decode_draft_probs(None)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    TARGET = torch.rand(K + 1, V, generator=generator).add(0.2)
    TARGET /= TARGET.sum(-1, keepdim=True)
    drafter = torch.rand(K, V, generator=generator).add(0.1)
    drafter /= drafter.sum(-1, keepdim=True)
    token_0 = torch.eye(V)[0].expand(K, V)  # what a drafter of NaN draws
    sound, nan = drafter.repeat(REQUESTS, 1), torch.full((REQUESTS * K, V), float("nan"))
    mixed = torch.where(torch.arange(REQUESTS * K)[:, None] % 3 == 0, nan, sound)
    cases = {
        "sound": (drafter, sound),
        "certain": (drafter, None),
        "NaN, dropped": (token_0, dropped(nan.clone())),
        "some NaN, dropped": (drafter, dropped(mixed)),
        "NaN": (token_0, nan),
        "off by a half": (drafter, sound / 2),
    }
    print(json.dumps({name: p_value(outputs(*case, generator)) for name, case in cases.items()}))
