"""The log-probabilities that come back with sampled tokens are Hugging Face's, whatever else goes on in the engine.

RL trains on them. One engine per family and logprobs mode serves all policies in turn, so that the suite stays short.
"""

from __future__ import annotations

import pytest
from tiny_engine import prompts

from benchmarks.lossless.drawing import parameters
from benchmarks.lossless.exact import Exact, Sampling

pytestmark = pytest.mark.engine

CONTROLS = ("fixed", "rand", "cycle", "live_table", "bandit")
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


def params(i: int):
    return parameters(SAMPLINGS[i % len(SAMPLINGS)], TOKENS, logprobs=0)


def check(exact: Exact, mode: str, prompt: list[int], completion, sampling: Sampling) -> None:
    """One completion's log-probabilities against Hugging Face's."""
    tokens = list(completion.token_ids)
    theirs = [row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)]
    processed = mode == "processed_logprobs" and sampling.temperature > 0
    assert theirs == pytest.approx(exact.of_tokens(prompt, tokens, sampling if processed else None), abs=TOLERANCE)


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def exact(models, family) -> Exact:
    return Exact(models["target" if family == "qwen3" else f"{family}-target"])


@pytest.mark.parametrize(
    ("source", "pressure"), [("eagle", {}), ("eagle", PRESSURE), ("ngram", {})], ids=["calm", "pressed", "ngrams"]
)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3", "processed_logprobs"),
        ("llama", "raw_logprobs"),
        pytest.param("qwen3", "raw_logprobs", marks=pytest.mark.heavy),
        pytest.param("llama", "processed_logprobs", marks=pytest.mark.heavy),
    ],
    indirect=["family"],
)
def test_log_probabilities_are_hugging_faces(engine_of, exact, family, mode, source, pressure):
    speculation = {"source": source}
    with engine_of("good", family=family, logprobs_mode=mode, speculation=speculation, **pressure) as engine:
        preempt, preempted = engine.scheduler._preempt_request, []
        engine.patch.setattr(engine.scheduler, "_preempt_request", lambda *a, **k: preempted.append(preempt(*a, **k)))
        for name in CONTROLS:
            engine.put_in_charge(name)
            requests = prompts(REQUESTS)
            outputs = engine.llm.generate(requests, [params(i) for i in range(REQUESTS)], use_tqdm=False)
            for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
                check(exact, mode, request["prompt_token_ids"], output.outputs[0], SAMPLINGS[i % len(SAMPLINGS)])
        stats = engine.scheduler.tlt.stats()
        assert stats.failure is None
        assert all(stats.steps_by_draft_length[k] for k in ARMS)
        assert sum(stats.num_accepted_tokens_per_pos) > (20 if source == "ngram" else 100)
        assert bool(preempted) == bool(pressure)
        if source != "eagle":
            assert engine.scheduler.tlt_ngram.num_accepted > 10


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.heavy)], indirect=True)
def test_log_probabilities_across_a_drafter_swap_an_abort_and_a_resumption(engine_of, exact, family, models):
    """A request is aborted and continued from what it had, as verl's partial rollouts are, with another drafter."""
    prefix = "" if family == "qwen3" else f"{family}-"
    mode = "processed_logprobs"
    with engine_of(
        "bad", family=family, policy="policies:longest", enable_prefix_caching=True, logprobs_mode=mode
    ) as engine:
        vllm_engine, requests = engine.llm.llm_engine, prompts(REQUESTS)
        for i, request in enumerate(requests):
            vllm_engine.add_request(f"first-{i}", request, params(i))
        partial, done = {}, {}
        for step in range(500):
            for output in vllm_engine.step():
                name = output.request_id
                (done if output.finished else partial)[name] = output
            if step == 12:
                assert engine.rpc("tlt_load_drafter", str(models[f"{prefix}good"] / "model.safetensors"))["ok"]
            if step == 16:
                held = {name: partial[name] for name in list(partial)[: REQUESTS // 2] if name not in done}
                assert held
                vllm_engine.abort_request(list(held), internal=False)
                for name, output in held.items():
                    i = int(name.rpartition("-")[2])
                    check(exact, mode, requests[i]["prompt_token_ids"], output.outputs[0], SAMPLINGS[i % 3])
                    longer = [*requests[i]["prompt_token_ids"], *output.outputs[0].token_ids]
                    requests.append({"prompt_token_ids": longer})
                    vllm_engine.add_request(f"again-{i}-{len(requests) - 1}", requests[-1], params(i))
            if not vllm_engine.has_unfinished_requests():
                break
        finished = [output for name, output in done.items() if name not in held]
        assert len(finished) == REQUESTS
        for output in finished:
            i = int(output.request_id.split("-")[1])
            check(exact, mode, list(output.prompt_token_ids), output.outputs[0], SAMPLINGS[i % 3])
        assert engine.scheduler.tlt.stats().num_accepted_tokens_per_pos[0] > 30
