"""Run by a test in a process of its own: tokens drawn by vLLM's V2 model runner with drafts of any length.

Its kernels run in Triton's interpreter. Prints JSON: for each way to draft the outputs of each prompt, how many steps
drafted how much, and how many drafts were accepted of how many; and the log-probabilities of a few outputs. Arguments:
directories of the policy and of a drafter of it, and how many outputs are drawn of each prompt.
"""

import json
import sys

import interpreted  # noqa: F401
from draws import ENUMERATED, HOT, PROMPTS, draw, drawn, parameters
from v2_engine import started

from benchmarks.lossless.exact import Sampling

LIMITS = {"max_model_len": 32, "max_num_seqs": 64, "max_num_batched_tokens": 512}
TOKENS = ENUMERATED + 2


def observe(engine, draws, policy="rand", sampling=HOT):
    engine.put_in_charge(policy)
    engine.scheduler.tlt.stats(reset=True)
    outputs = draw(engine, sampling, int(draws), tokens=TOKENS)
    stats = engine.scheduler.tlt.stats(reset=True)
    return {"outputs": [found.tolist() for found in outputs], "steps": stats.steps_by_draft_length,
            "drafts": stats.num_drafts, "accepted": sum(stats.num_accepted_tokens_per_pos)}  # fmt: skip


def tell(engine):
    """For each prompt (tokens, log-probabilities told) of some outputs, under sampling that they do not depend on."""
    asked = [parameters(Sampling(temperature=0.7), TOKENS, logprobs=0)] * 6
    return [
        [
            (list(one.token_ids), [row[t].logprob for row, t in zip(one.logprobs, one.token_ids, strict=True)])
            for one in of
        ]
        for of in drawn(engine.llm, PROMPTS, asked)
    ]


def accept_one_too_many(engine):
    """A biased sampler: the first draft that is rejected is taken all the same; and drafts that show it: any token."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    engine.runner.speculator.model.model.norm.weight.data.zero_()
    sample = rejection_sampler.rejection_sample

    def willing(target, q, drafts, starts, *rest, **more):
        sampled, count = sample(target, q, drafts, starts, *rest, **more)
        last = count.long() - 1
        rejected = last < starts.diff() - 1
        at = (starts[:-1] + last + 1)[rejected]
        sampled[rejected, last[rejected]] = drafts[at].long()
        return sampled, count

    engine.patch.setattr(rejection_sampler, "rejection_sample", willing)


if __name__ == "__main__":
    target, good, draws = sys.argv[1:]
    with started(target, good, **LIMITS) as engine:
        assert type(engine.runner).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
        found = {"any K": observe(engine, draws), "told": tell(engine)}
        accept_one_too_many(engine)
        found["one too many"] = observe(engine, draws, "longest")
    print(json.dumps(found))
