"""The log-probabilities that come back with sampled tokens are Hugging Face's, whatever else goes on in the engine.

RL trains on them. One engine per family and logprobs mode serves all policies in turn, so that the suite stays short.
"""

from __future__ import annotations

import pytest
from draws import swaps_and_pauses
from shared_engines import part_of
from tiny_engine import prompts

from benchmarks.lossless.drawing import parameters
from benchmarks.lossless.exact import Exact, Sampling

pytestmark = pytest.mark.engine

CONTROLS = ("fixed", "rand", "live_table")
ARMS = (0, 1, 2, 3)
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=20), Sampling(temperature=0.0)]
REQUESTS, TOKENS, TOLERANCE = 6, 40, 1e-4
PRESSURE = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 16,  # prompts in chunks, and not everybody runs in every step
    "max_num_seqs": 6,
    "num_gpu_blocks_override": 5,  # not enough cache for all: preemptions
    "block_size": 32,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def exact(models) -> dict[str, Exact]:
    """The policies as transformers computes them, by family."""
    return {family: Exact(models[part_of(family, "target")]) for family in ("qwen3", "llama")}


@pytest.mark.parametrize(
    ("source", "pressure"), [("eagle", {}), ("eagle", PRESSURE), ("ngram", {})], ids=["swapped", "pressed", "ngrams"]
)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3", "processed_logprobs"),
        ("llama", "raw_logprobs"),
        pytest.param("qwen3", "raw_logprobs", marks=pytest.mark.heavy),
        pytest.param("llama", "processed_logprobs", marks=pytest.mark.heavy),
    ],
)
def test_log_probabilities_are_hugging_faces(engine_of, models, exact, family, mode, source, pressure):
    samplings, requests = [SAMPLINGS[i % len(SAMPLINGS)] for i in range(REQUESTS)], prompts(REQUESTS)
    params = [parameters(sampling, TOKENS, logprobs=0) for sampling in samplings]
    speculation = {"source": source}
    with engine_of("good", family=family, logprobs_mode=mode, speculation=speculation, **pressure) as engine:
        preempt, preempted = engine.scheduler._preempt_request, []
        engine.patch.setattr(engine.scheduler, "_preempt_request", lambda *a, **k: preempted.append(preempt(*a, **k)))
        if source == "eagle" and not pressure:
            drafters = [str(models[part_of(family, part)] / "model.safetensors") for part in ("good", "bad")]
            swaps_and_pauses(engine, drafters)
        for name in CONTROLS:
            engine.put_in_charge(name)
            for asked, output, sampling in zip(
                requests, engine.llm.generate(requests, params, use_tqdm=False), samplings, strict=True
            ):
                (completion,) = output.outputs
                tokens = list(completion.token_ids)
                told = [row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)]
                processed = mode == "processed_logprobs" and sampling.temperature > 0
                theirs = exact[family].of_tokens(asked["prompt_token_ids"], tokens, sampling if processed else None)
                assert told == pytest.approx(theirs, abs=TOLERANCE)
        stats = engine.scheduler.tlt.stats()
        assert stats.failure is None
        assert all(stats.steps_by_draft_length[k] for k in ARMS)
        assert sum(stats.num_accepted_tokens_per_pos) > (20 if source == "ngram" else 100)
        assert bool(preempted) == bool(pressure)
