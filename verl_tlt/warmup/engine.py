"""Stock vLLM in a process of its own: responses to prompts, and how many drafted tokens it accepted.

Responses are written one by one as they finish, so that a killed run keeps what it has. No plugin is loaded: what is
measured here is what `vllm serve` does. (On the CPU the two repairs of `verl_cpu.vllm_shims` are needed to sample.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_tlt.child_engine import require_cpu_platform, run_job
from verl_tlt.drafter.policy import DrafterError

RESPONSES = "responses.jsonl"
ENVIRONMENT = {"cpu": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "cuda": {"VLLM_PLUGINS": ""}}
"""Of the engine's process, by device. On the CPU, `verl_cpu` is a plugin of vLLM's."""


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
        directory: for the responses, and for what `child_engine` keeps.
        progress: told (responses done, responses wanted) every second.

    Returns:
        All responses, ordered by prompt and sample; and vLLM's counters where a drafter was given.

    Raises:
        ChildEngineError: the engine ended early; the end of its log is in the message.
    """
    out, answer = directory / RESPONSES, directory / "answer.json"
    total = len(job.prompts) * job.samples
    if len(read_responses(out)) < total or (job.drafter and not answer.is_file()):
        if job.device == "cpu":
            require_cpu_platform()
        run_job(
            "verl_tlt.warmup.engine_process",
            asdict(job),
            directory,
            ENVIRONMENT[job.device] | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            tell=lambda: progress(_count(out), total),
        )
    responses = sorted(read_responses(out).values(), key=lambda r: (r.prompt, r.sample))
    progress(len(responses), total)
    if not job.drafter:
        return responses, None
    counted = json.loads(answer.read_text())
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
