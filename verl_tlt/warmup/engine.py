"""Stock vLLM in a process of its own: responses to prompts, and how many drafted tokens it accepted.

A process of its own returns all memory when it ends, on every device, and a crash of the engine ends in a sentence.
Responses are written one by one as they finish, so that a killed run keeps what it has. No plugin is loaded: what is
measured here is what `vllm serve` does. (On the CPU the two repairs of `compat.cpu.vllm_shims` are needed to sample.)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_tlt.compat.cpu.environment import CPU_ENGINE
from verl_tlt.drafter.policy import DrafterError

POLL_S = 1.0
_LAST_LINES = 15
_CPU = {**CPU_ENGINE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "tlt_cpu"}


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    max_tokens: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class GenerationJob:
    """What the engine is asked."""

    model: str
    prompts: list[list[int]]
    samples: int
    sampling: SamplingSettings
    device: str
    """"cpu" or "cuda"."""
    drafter: str | None = None
    draft_length: int = 3
    tensor_parallel: int = 1
    memory: float = 0.85
    """Share of each GPU's memory."""


@dataclass(frozen=True)
class Response:
    """One response of one prompt."""

    prompt: int
    """Number of the prompt."""
    sample: int
    tokens: tuple[int, ...]
    finished: bool
    """It ended by itself, not at `max_tokens`."""


@dataclass(frozen=True)
class Served:
    """What vLLM counted while it drafted."""

    drafts: int
    accepted: tuple[int, ...]
    """[k]: drafts whose first k+1 tokens were accepted."""
    seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens per draft, between 1 and K + 1; 1 without a draft."""
        return 1.0 + (sum(self.accepted) / self.drafts if self.drafts else 0.0)

    @property
    def accept(self) -> list[float]:
        """Acceptance by position, given that the positions before were accepted."""
        before = (self.drafts, *self.accepted[:-1])
        return [a / b if b else 0.0 for a, b in zip(self.accepted, before, strict=True)]


def find_device(wanted: str) -> str:
    """Where to compute: "cuda" or "cpu".

    Raises:
        DrafterError: CUDA is asked for and not there.
    """
    import torch

    if wanted not in ("auto", "cuda", "cpu"):
        raise DrafterError(f"--device must be auto, cuda or cpu, not {wanted!r}.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DrafterError("--device cuda, but torch finds no CUDA device.")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def generate(
    job: GenerationJob, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Response], Served | None]:
    """Run `job`, or what is left of it where `directory` holds responses of an earlier try.

    Args:
        job: what to generate; the caller sees to it that `directory` belongs to it.
        directory: for `responses.jsonl`, `served.json` and the engine's log.
        progress: told (responses done, responses wanted) a few times a second.

    Returns:
        All responses, ordered by prompt and sample; and vLLM's counters where a drafter was given.

    Raises:
        DrafterError: the engine ended early; the end of its log is in the message.
    """
    directory.mkdir(parents=True, exist_ok=True)
    out, log = directory / "responses.jsonl", directory / "engine.log"
    total = len(job.prompts) * job.samples
    served = directory / "served.json"
    if len(read_responses(out)) < total or (job.drafter and not served.is_file()):
        (directory / "job.json").write_text(json.dumps(asdict(job)))
        environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if job.device == "cpu":
            environment = {**environment, **_CPU}
        with log.open("w") as stream:
            command = [sys.executable, "-m", "verl_tlt.warmup.engine", str(directory)]
            child = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
            try:
                while child.poll() is None:
                    progress(_count(out), total)
                    time.sleep(POLL_S)
            finally:
                child.terminate()
                child.wait()
        if child.returncode != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise DrafterError(f"vLLM ended early ({log}):\n{end}")
    responses = sorted(read_responses(out).values(), key=lambda r: (r.prompt, r.sample))
    progress(len(responses), total)
    if not job.drafter:
        return responses, None
    counted = json.loads(served.read_text())
    return responses, Served(counted["drafts"], tuple(counted["accepted"]), counted["seconds"])


def read_responses(file: Path) -> dict[tuple[int, int], Response]:
    """What was generated so far, by (prompt, sample); a line that a kill cut short is left out."""
    found = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["prompt"], row["sample"]] = Response(
            row["prompt"], row["sample"], tuple(row["tokens"]), row["finished"]
        )
    return found


def _count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


# ---------------------------------------------------------------- inside the child


def _engine(job: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cpu = job["device"] == "cpu"
    arguments: dict[str, Any] = dict(
        model=job["model"], skip_tokenizer_init=True, seed=job["sampling"]["seed"], disable_log_stats=False,
        tensor_parallel_size=job["tensor_parallel"], enforce_eager=cpu,
    )  # fmt: skip
    if job["tensor_parallel"] == 1:
        arguments["distributed_executor_backend"] = "uni"
    if not cpu:
        arguments["gpu_memory_utilization"] = job["memory"]
    if job["drafter"]:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["draft_length"],
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


def _run(directory: Path) -> None:
    """Generate what `job.json` asks and `responses.jsonl` lacks."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    job = json.loads((directory / "job.json").read_text())
    out = directory / "responses.jsonl"
    done = read_responses(out)
    engine, sampling = _engine(job), job["sampling"]
    for prompt, tokens in enumerate(job["prompts"]):
        for sample in range(job["samples"]):
            if (prompt, sample) in done:
                continue
            params = SamplingParams(
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=sampling["top_k"],
                max_tokens=sampling["max_tokens"],
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
    if job["drafter"]:
        facts = {**_counters(engine), "seconds": time.perf_counter() - start}
        (directory / "served.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    # Ends with its parent, however that ends (prctl's PR_SET_PDEATHSIG); nobody else would stop the engine.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    _run(Path(sys.argv[1]))
