"""Run by a test in a process of its own: vLLM's V2 model runner under our scheduler, in Triton's interpreter.

Prints JSON: the tokens that transformers decodes greedily, and for each way to draft those of the engine, how often the
drafter ran, and how many steps drafted how much; the same of sampled tokens with a drafter whose logits are NaN.
Arguments: directories of the policy and of a drafter of it, and "any K" where this runner drafts the K that it is asked
for.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import interpreted  # noqa: F401

REQUESTS, TOKENS = 4, 16
SAMPLED = {"temperature": 1.0, "seed": 7}
LIMITS = {"max_model_len": 64, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 64}


def expected(target):
    import torch
    import transformers
    from tiny_engine import prompts

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    found = []
    for i, prompt in enumerate(prompts(REQUESTS)):
        ids, length = torch.tensor([prompt["prompt_token_ids"]]), max(8, TOKENS * (i + 1) // REQUESTS)
        whole = model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


def observe(engine, passes, *, worker=True, scheduler=True, draft_length=None, policy="longest", **sampling):
    """Decode with the drafter switched on or off in worker and scheduler; `draft_length` None: the policy's."""
    engine.put_in_charge(policy)
    assert engine.llm.reset_prefix_cache()
    passes.clear()
    engine.rpc("tlt_set_drafting", worker)
    engine.scheduler.tlt.control(drafting=scheduler, force_k=draft_length)
    engine.scheduler.tlt.stats(reset=True)
    tokens = engine.generate(REQUESTS, TOKENS, **sampling)
    stats = engine.scheduler.tlt.stats(reset=True)
    return {"tokens": tokens, "passes": len(passes), "steps": stats.steps_by_draft_length,
            "accepted": sum(stats.num_accepted_tokens_per_pos)}  # fmt: skip


def ruin(engine):
    """Have the drafter compute NaN, as one that was trained into it and passed its checks."""
    inner = engine.runner.speculator.model.model
    (projection,) = (p for name, p in inner.named_parameters() if name.endswith("fc.weight"))
    projection.data.fill_(float("nan"))


@contextmanager
def started(target, good, **arguments):
    """An engine of a policy and a drafter, by their directories, on vLLM's V2 model runner."""
    from shared_engines import SharedEngines
    from verl.workers.rollout.vllm_rollout import utils

    utils.set_death_signal = lambda: None
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    engines = SharedEngines({"target": Path(target), "good": Path(good)})
    with engines("good", **arguments) as engine:
        yield engine
    engines.close()


if __name__ == "__main__":
    target, good, any_k = sys.argv[1:]
    with started(target, good, enable_sleep_mode=True, **LIMITS) as engine:
        passes = []
        engine.runner.speculator.model.register_forward_hook(lambda *_: passes.append(1))
        found = {
            "transformers": {"tokens": expected(target)},
            "K=0": observe(engine, passes, draft_length=0),
            "drafting": observe(engine, passes),
            **({"any K": observe(engine, passes, policy="rand")} if any_k == "any K" else {}),
            "OFF": observe(engine, passes, worker=False, scheduler=False),
            "OFF, and the scheduler did not hear of it": observe(engine, passes, worker=False),
            "drafting again": observe(engine, passes),
            "runner": type(engine.runner).__mro__[1].__module__,
        }
        engine.runner._dummy_run(8)
        assert engine.sync(Path(good) / "model.safetensors") is None
        found["after a sync"] = observe(engine, passes)
        ruin(engine)
        found["NaN"] = observe(engine, passes, **SAMPLED)
        assert engine.sync(Path(good) / "model.safetensors") is None
        found["after NaN and a sync"] = observe(engine, passes)
        ruin(engine)
        engine.patch.delattr(engine.runner.speculator.model, "compute_logits")  # ours; the class has vLLM's
        found["NaN that nobody replaces"] = observe(engine, passes, **SAMPLED)
    print(json.dumps(found))
