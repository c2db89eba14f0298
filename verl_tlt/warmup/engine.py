"""Stock vLLM in a process of its own: responses to prompts, and how many drafted tokens it accepted.

Responses are written one by one as they finish, so that a killed run keeps what it has. No plugin is loaded: what is
measured here is what `vllm serve` does (but for the repairs of `verl_cpu.vllm_shims` on the CPU). The parent calls
`generate`; the child is this module run as a program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_tlt.child_engine import require_cpu_platform, run_job, serve_job
from verl_tlt.drafter import Text
from verl_tlt.drafter.evaluate import DraftCounts
from verl_tlt.drafter.policy import DrafterError
from verl_tlt.warmup.options import SamplingOptions

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

RESPONSES = "responses.jsonl"
ENVIRONMENT = {"cpu": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "cuda": {"VLLM_PLUGINS": ""}}
"""Of the engine's process, by device. On the CPU, `verl_cpu` is a plugin of vLLM's."""
GPU_MEMORY = 0.85
"""Share of each GPU's memory that the engine takes."""


@dataclass(frozen=True)
class GenerationJob:
    """What the engine is asked; `device` is "cpu" or "cuda"."""

    model: str
    prompts: list[list[int]]
    sampling: SamplingOptions
    device: str
    samples: int = 1
    """Responses per prompt."""
    drafter: str | None = None
    """Directory of what drafts; an MTP head is in the model's own."""
    method: str = "eagle3"
    draft_length: int = 3
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Response:
    """One response of the prompt with that number."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]


def find_device(wanted: str) -> str:
    """Where to compute, "cuda" or "cpu", by the option `--device`."""
    if wanted not in ("auto", "cuda", "cpu"):
        raise DrafterError(f"--device must be auto, cuda or cpu, not {wanted!r}.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DrafterError("--device cuda, but torch finds no CUDA device.")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def generate(
    job: GenerationJob, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Response], DraftCounts | None]:
    """Run `job`, or what is left of it where `directory` holds responses of an earlier try of the same job.

    `progress` is told (responses done, responses wanted) every second. Returns all responses, ordered by prompt and
    sample, and vLLM's counters where a drafter was given; a `ChildEngineError` says why the engine ended early.
    """
    out, answer = directory / RESPONSES, directory / "answer.json"
    total = len(job.prompts) * job.samples
    if len(_read_responses(out)) < total or (job.drafter and not answer.is_file()):
        if job.device == "cpu":
            require_cpu_platform()
        run_job(
            "verl_tlt.warmup.engine",
            asdict(job),
            directory,
            ENVIRONMENT[job.device] | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            tell=lambda: progress(out.read_bytes().count(b"\n") if out.is_file() else 0, total),
        )
    responses = sorted(_read_responses(out).values(), key=lambda r: (r.prompt, r.sample))
    progress(len(responses), total)
    if not job.drafter:
        return responses, None
    counted = json.loads(answer.read_text())
    return responses, DraftCounts(counted["drafts"], np.array(counted["accepted"]))


def _read_responses(file: Path) -> dict[tuple[int, int], Response]:
    """What was generated so far, by (prompt, sample); a line that a kill cut short is left out."""
    found = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["prompt"], row["sample"]] = Response(row["prompt"], row["sample"], tuple(row["tokens"]))
    return found


def as_texts(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> list[Text]:
    """Each response behind its prompt."""
    return [Text((*prompts[r.prompt], *r.tokens), len(prompts[r.prompt])) for r in responses]


# ------------------------------------------------------------------ in the child


def _start_engine(job: GenerationJob) -> LLMEngine:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cpu = job.device == "cpu"
    arguments: dict[str, Any] = dict(
        model=job.model, skip_tokenizer_init=True, seed=job.sampling.seed, disable_log_stats=False,
        tensor_parallel_size=job.tensor_parallel, enforce_eager=cpu,
        distributed_executor_backend="uni" if job.tensor_parallel == 1 else None,
    )  # fmt: skip
    if not cpu:
        arguments["gpu_memory_utilization"] = GPU_MEMORY
    if job.drafter:
        arguments["speculative_config"] = {
            "method": job.method,
            **({"model": job.drafter} if job.method == "eagle3" else {}),
            "num_speculative_tokens": job.draft_length,
            # Sampled drafts: vLLM's default drafts greedily, which temperature 1 seldom accepts.
            "draft_sample_method": "probabilistic",
        }
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Generate what is asked and not there yet; what vLLM counted is the answer, where a drafter was given."""
    job = GenerationJob(**asked | {"sampling": SamplingOptions(**asked["sampling"])})
    out = directory / RESPONSES
    done = _read_responses(out)
    engine = _start_engine(job)
    _add_requests(engine, job, done)
    with out.open("a") as stream:
        if done or out.stat().st_size:
            stream.write("\n")  # after a line that a kill cut short
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                prompt, sample = map(int, output.request_id.split("-")[:2])
                response = Response(prompt, sample, tuple(output.outputs[0].token_ids))
                stream.write(json.dumps(asdict(response)) + "\n")
            stream.flush()
    if not job.drafter:
        return {}
    counters = {metric.name: metric for metric in engine.get_metrics()}
    return {
        "drafts": int(counters["vllm:spec_decode_num_drafts"].value),
        "accepted": [int(n) for n in counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
    }


def _add_requests(engine: LLMEngine, job: GenerationJob, done: dict[tuple[int, int], Response]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for prompt, tokens in enumerate(job.prompts):
        for sample in range(job.samples):
            if (prompt, sample) in done:
                continue
            params = SamplingParams(
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                top_k=job.sampling.top_k,
                max_tokens=job.sampling.response_length,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{prompt}-{sample}", {"prompt_token_ids": tokens}, params)


if __name__ == "__main__":
    serve_job(_work)
