"""Run by a test in a process of its own: vLLM's Triton rejection kernels, which GPUs run, under Triton's interpreter.

Prints {case: p-value} as JSON: of the first two tokens of many requests against the target, two drafts each.
"""

import importlib
import json
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language
import vllm.triton_utils
from kernel_draws import REQUESTS, K, V, draw_drafts, draw_models, p_value

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # vLLM has a stand-in where there is no GPU
rejection_sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")


def outputs(target, drafter, probs, generator):
    """What the kernels emit, [REQUESTS, K + 1], -1 behind a rejected draft.

    Args:
        target: [K + 1, V] by position.
        drafter: [K, V] that drafts are drawn from.
        probs: [REQUESTS * K, V] that they are verified with; None: as certain.
        generator: of the drafts.
    """
    drafts = draw_drafts(drafter, generator)
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
