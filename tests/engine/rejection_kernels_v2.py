"""Run by a test in a process of its own: the rejection kernels of vLLM's V2 model runner under Triton's interpreter.

Prints {case: p-value} as JSON, as `rejection_kernels`. Argument: the folder of a vLLM release's sources.
"""

import importlib
import json
import sys

sys.path.insert(0, sys.argv[1])

import interpreted  # noqa: F401
import torch
from kernel_draws import K, V, draw_models, p_value

kernels = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
gumbel = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
assert kernels.__file__.startswith(sys.argv[1])

REQUESTS, SLOTS = 240, 300
STARTS, STEPS = (torch.arange(REQUESTS + 1) * (K + 1)).int(), torch.arange(K + 1).repeat(REQUESTS).int()
SEEDS = torch.arange(SLOTS) + 77


def outputs(target, drafts, logits, slots):
    """What the kernels emit, [REQUESTS, K + 1], -1 behind a rejected draft.

    Args:
        target: [K + 1, V] by position.
        drafts: [REQUESTS, K].
        logits: [SLOTS, K, V] that they are verified with.
        slots: [REQUESTS], each request's.
    """
    verified = torch.nn.functional.pad(drafts, (1, 0)).flatten().int()
    sampled, count = kernels.rejection_sample(
        target.log().repeat(REQUESTS, 1), logits, verified, STARTS, torch.arange(REQUESTS * (K + 1)), slots,
        slots.repeat_interleave(K + 1), STEPS, torch.ones(SLOTS), SEEDS, K,
    )  # fmt: skip
    return sampled.masked_fill(torch.arange(K + 1) >= count[:, None], -1)


def with_noise(drafter, slots):
    """Drafts [REQUESTS, K] drawn as the V2 drafter draws: a token's noise follows from seed and position."""
    places = torch.arange(REQUESTS) * (K + 1)
    drawn = [
        gumbel.gumbel_sample(
            row.log().repeat(REQUESTS, 1), slots, torch.ones(SLOTS), SEEDS, places + step,
            apply_temperature=True, is_drafting=True,
        )
        for step, row in enumerate(drafter)
    ]  # fmt: skip
    return torch.stack(drawn, 1)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(5)
    target, drafter = draw_models(generator)
    slots = torch.randperm(SLOTS, generator=generator)[:REQUESTS].int()
    token_0 = torch.zeros(REQUESTS, K, dtype=torch.int64)
    nan, sound = torch.full((SLOTS, K, V), float("nan")), drafter.log().repeat(SLOTS, 1, 1)
    cases = {"NaN": (token_0, nan), "vLLM's own noise": (with_noise(drafter, slots), sound)}
    found = {name: p_value(target, outputs(target, *case, slots), generator) for name, case in cases.items()}
    print(json.dumps(found))
