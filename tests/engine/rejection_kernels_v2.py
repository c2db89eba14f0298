"""Run by a test in a process of its own: the rejection kernels of vLLM's V2 model runner under Triton's interpreter.

Prints {case: p-value} as JSON, as `rejection_kernels`. Argument: the folder of a vLLM release's sources.
"""

import importlib
import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import torch
import triton.language as tl
from kernel_draws import K, V, draw_drafts, draw_models, p_value
from triton.backends import backends
from triton.language.extra import libdevice

backends["cpu"] = SimpleNamespace(driver=None, compiler=None)  # else vLLM sees no Triton here
libdevice.log1p = lambda x: tl.log(x + 1.0)  # the interpreter has none
kernels = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
assert kernels.__file__.startswith(sys.argv[1])

REQUESTS, SLOTS = 160, 200  # these kernels take 8,192 tokens at once, however few there are: a minute each case


def outputs(target, drafts, logits, slots):
    """What the kernels emit, [REQUESTS, K + 1], -1 behind a rejected draft.

    Args:
        target: [K + 1, V] by position.
        drafts: [REQUESTS, K].
        logits: [SLOTS, K, V] that they are verified with.
        slots: [REQUESTS], each request's.
    """
    rows, steps = torch.arange(REQUESTS * (K + 1)), torch.arange(K + 1).repeat(REQUESTS).int()
    sampled, count = kernels.rejection_sample(
        target.log().repeat(REQUESTS, 1), logits, torch.nn.functional.pad(drafts, (1, 0)).flatten().int(),
        (torch.arange(REQUESTS + 1) * (K + 1)).int(), rows, slots, slots.repeat_interleave(K + 1), steps,
        torch.ones(SLOTS), torch.arange(SLOTS) + 77, K,
    )  # fmt: skip
    return sampled.masked_fill(torch.arange(K + 1) >= count[:, None], -1)


if __name__ == "__main__":
    from verl_tlt.vllm_worker.draft_rows import make_certain

    generator = torch.Generator().manual_seed(5)
    target, drafter = draw_models(generator)
    slots = torch.randperm(SLOTS, generator=generator)[:REQUESTS].int()
    drawn, token_0 = draw_drafts(drafter, generator, REQUESTS), torch.zeros(REQUESTS, K, dtype=torch.int64)
    nan, mixed = torch.full((SLOTS, K, V), float("nan")), drafter.log().repeat(SLOTS, 1, 1)
    mixed[::3] = float("nan")
    mixed[1::3, 1, 3] = float("inf")
    cases = {"NaN": (token_0, nan.clone()), "NaN, guarded": (token_0, nan), "some broken, guarded": (drawn, mixed)}
    make_certain(nan, slots, token_0)
    make_certain(mixed, slots, drawn)
    found = {name: p_value(target, outputs(target, *case, slots), generator) for name, case in cases.items()}
    print(json.dumps(found))
