"""The child process of `warmup.engine`: starts stock vLLM and writes each response when it is finished."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from verl_tlt.child_engine import serve_job
from verl_tlt.warmup.engine import RESPONSES, GenerationJob, SamplingSettings, read_responses


def _engine(job: GenerationJob) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cpu = job.device == "cpu"
    arguments: dict[str, Any] = dict(
        model=job.model, skip_tokenizer_init=True, seed=job.sampling.seed, disable_log_stats=False,
        tensor_parallel_size=job.tensor_parallel, enforce_eager=cpu,
    )  # fmt: skip
    if job.tensor_parallel == 1:
        arguments["distributed_executor_backend"] = "uni"
    if not cpu:
        arguments["gpu_memory_utilization"] = job.memory
    if job.drafter:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": job.drafter,
            "num_speculative_tokens": job.draft_length,
            # Sampled drafts: vLLM's default drafts greedily, which temperature 1 seldom accepts.
            "draft_sample_method": "probabilistic",
        }
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _counters(engine: Any) -> dict[str, Any]:
    values: dict[str, Any] = {m.name: m for m in engine.get_metrics()}
    return {
        "drafts": int(values["vllm:spec_decode_num_drafts"].value),
        "accepted": [int(n) for n in values["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
    }


def _generate(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Generate what is asked and not there yet; what vLLM counted is the answer, where a drafter was given."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    job = GenerationJob(**asked | {"sampling": SamplingSettings(**asked["sampling"])})
    out = directory / RESPONSES
    done = read_responses(out)
    engine, sampling = _engine(job), job.sampling
    for prompt, tokens in enumerate(job.prompts):
        for sample in range(job.samples):
            if (prompt, sample) in done:
                continue
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{prompt}-{sample}", {"prompt_token_ids": tokens}, params)
    start = time.perf_counter()
    with out.open("a") as stream:
        if done or out.stat().st_size:
            stream.write("\n")  # after a line that a kill cut short
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                prompt, sample = map(int, output.request_id.split("-")[:2])
                answer = output.outputs[0]
                row = {
                    "prompt": prompt,
                    "sample": sample,
                    "tokens": list(answer.token_ids),
                    "finished": answer.finish_reason == "stop",
                }
                stream.write(json.dumps(row) + "\n")
            stream.flush()
    return {**_counters(engine), "seconds": time.perf_counter() - start} if job.drafter else {}


if __name__ == "__main__":
    serve_job(_generate)
