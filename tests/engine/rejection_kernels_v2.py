"""Run by a test in a process of its own: the rejection kernels of vLLM's V2 model runner under Triton's interpreter.

Prints {case: p-value} as JSON, as `rejection_kernels`. Argument: the folder of a vLLM release's sources.
"""

import importlib
import json
import sys
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])

import interpreted  # noqa: F401
import numpy as np
import torch
from kernel_draws import K, V, draw_drafts, draw_models, p_value

kernels = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
gumbel = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
structured_outputs = importlib.import_module("vllm.v1.worker.gpu.structured_outputs")
assert kernels.__file__.startswith(sys.argv[1])

REQUESTS, SLOTS = 240, 300
STARTS, STEPS = (torch.arange(REQUESTS + 1) * (K + 1)).int(), torch.arange(K + 1).repeat(REQUESTS).int()
SEEDS = torch.arange(SLOTS) + 77


def outputs(target, drafts, logits, slots, allowed=None):
    """What the kernels emit, [REQUESTS, K + 1], -1 behind a rejected draft.

    Args:
        target: [K + 1, V] by position.
        drafts: [REQUESTS, K].
        logits: [SLOTS, K, V] that they are verified with.
        slots: [REQUESTS], each request's.
        allowed: drafts of each request that a grammar is said to allow.
    """
    verified = torch.nn.functional.pad(drafts, (1, 0)).flatten().int()
    if allowed is not None:
        batch = SimpleNamespace(
            num_reqs=REQUESTS, num_draft_tokens=REQUESTS * K, num_draft_tokens_per_req=np.full(REQUESTS, K),
            req_ids=list(range(REQUESTS)), expanded_local_pos=STEPS, cu_num_logits=STARTS,
        )  # fmt: skip
        verified[structured_outputs.grammar_invalid_drafts(batch, batch.req_ids, allowed)] = -1
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


def under_a_grammar(slots, generator):
    """{case: p-value} where a grammar forbids the two tokens that a drafter draws half of the time."""
    target, drafter = (
        torch.tensor([row] * n) for row, n in (([0.5, 0, 0.25, 0, 0.25], K + 1), ([0.5, 0.245, 0.005, 0.245, 0.005], K))
    )
    drafts, q = draw_drafts(drafter, generator, REQUESTS), drafter.log().repeat(SLOTS, 1, 1)
    forbidden = torch.isin(drafts, torch.tensor([1, 3])).cummax(1).values
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens=dict(enumerate(drafts.masked_fill(forbidden, -1).tolist()))
    )  # as vLLM marks them
    ours, names, allowed = GrammarDrafts(), list(range(REQUESTS)), (~forbidden).sum(1).tolist()
    ours.note_marks(scheduled, names, drafts.tolist())
    told = SimpleNamespace(structured_output_request_ids=names, num_acceptable_drafts=allowed)
    cases = {"as none": allowed, "verified": ours.with_first_forbidden(told).num_acceptable_drafts}
    return {
        f"forbidden drafts {case}": p_value(target, outputs(target, drafts, q, slots, counts), generator)
        for case, counts in cases.items()
    }


if __name__ == "__main__":
    from verl_tlt.engine_core.grammar_drafts import GrammarDrafts
    from verl_tlt.vllm_worker.draft_rows import make_certain

    generator = torch.Generator().manual_seed(5)
    target, drafter = draw_models(generator)
    slots = torch.randperm(SLOTS, generator=generator)[:REQUESTS].int()
    drawn, token_0 = draw_drafts(drafter, generator, REQUESTS), torch.zeros(REQUESTS, K, dtype=torch.int64)
    nan, mixed = torch.full((SLOTS, K, V), float("nan")), drafter.log().repeat(SLOTS, 1, 1)
    mixed[::3] = float("nan")
    mixed[1::3, 1, 3] = float("inf")
    sound = drafter.log().repeat(SLOTS, 1, 1)
    cases = {
        "NaN": (token_0, nan.clone()), "NaN, guarded": (token_0, nan), "some broken, guarded": (drawn, mixed),
        "vLLM's own noise": (with_noise(drafter, slots), sound),
    }  # fmt: skip
    make_certain(nan, slots, token_0)
    make_certain(mixed, slots, drawn)
    found = {name: p_value(target, outputs(target, *case, slots), generator) for name, case in cases.items()}
    print(json.dumps(found | under_a_grammar(slots, generator)))
