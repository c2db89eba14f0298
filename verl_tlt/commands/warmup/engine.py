"""Responses to prompts from vLLM in a process of its own, and how many drafted tokens it accepted.

The engine is started as a run of verl's starts it (`commands.doctor.standalone_engine`); with a drafter, its workers
are those of a run with TLT. Responses are written one by one as they finish, so that a killed run keeps what it has.
The parent calls `generate`; the child is this module run as a program. `Stage` shows how far a command is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_tlt.checks.models import POLICY
from verl_tlt.checks.recipe import ROLLOUT, Recipe
from verl_tlt.commands.child_engine import require_cpu_platform, run_job, serve_job
from verl_tlt.commands.console import say
from verl_tlt.commands.doctor.standalone_engine import run_environment, set_up, start
from verl_tlt.commands.options import EngineOptions
from verl_tlt.commands.warmup.prompts import Prompt, open_images
from verl_tlt.commands.warmup.run import engine_values, longest_context, processor_options
from verl_tlt.drafter.capture import Text
from verl_tlt.drafter.evaluate import DraftCounts
from verl_tlt.drafter.model_files import folder, is_name
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG
from verl_tlt.messages import from_plain
from verl_tlt.server.calibration import decode
from verl_tlt.server.engine_arguments import most_requests

RESPONSES = "responses.jsonl"
ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # otherwise vLLM makes the executor `mp` of a recipe's `uni` there
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # all files are here
LINE_S = 60.0
"""Seconds between two lines of progress where the output is no terminal, unless another tenth is done."""


@dataclass(frozen=True)
class GenerationJob:
    recipe: Recipe
    changes: dict[str, Any]  # values of verl's config that differ from the recipe's, by their dotted keys
    prompts: list[Prompt]
    samples: int = 1
    drafting: Mapping[str, Any] | None = None  # vLLM's `speculative_config`
    processor_options: Mapping[str, Any] = field(default_factory=dict)


def generation_job(options: EngineOptions, prompts: Sequence[Prompt], **fields: Any) -> GenerationJob:
    """A job for the engine of the options' run; a policy on the hub was fetched before."""
    changes = {**engine_values(options), f"{ROLLOUT}.max_model_len": context_of(options, prompts)}
    if is_name(options.model):  # by its name, vLLM 0.24 would ask for every file of the repository
        changes[POLICY] = str(folder(options.model, (CONFIG,), fetch=False))
    cut = processor_options(options)
    return GenerationJob(options.recipe(), changes, list(prompts), processor_options=cut, **fields)


def context_of(options: EngineOptions, prompts: Sequence[Prompt]) -> int:
    """Longest sequence of the engine: the run's, else what these prompts and their responses need."""
    return longest_context(options) or max(len(prompt.tokens) for prompt in prompts) + options.response_length


@dataclass(frozen=True)
class Response:
    """One response to the prompt whose number is `prompt`."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]


def find_device(engine_gpus: int = 1) -> str:
    """Where to compute: "cuda", or "cpu" where torch finds no GPU; a `DrafterError` where an engine lacks GPUs."""
    if not torch.cuda.is_available():
        require_cpu_platform()
        return "cpu"
    seen = torch.cuda.device_count()
    if seen < engine_gpus:
        raise DrafterError(f"--tensor-parallel {engine_gpus} asks for {engine_gpus} GPUs, and torch finds {seen}.")
    return "cuda"


def generate(job: GenerationJob, directory: Path, stage: Stage) -> tuple[list[Response], DraftCounts | None]:
    """Run `job`, or what is left of it where `directory` holds responses of an earlier try of the same job.

    Returns all responses, ordered by prompt and sample, and vLLM's counters where a drafter was given; a
    `ChildEngineError` says why the engine ended early.
    """
    out = directory / RESPONSES
    total = len(job.prompts) * job.samples
    done = 0
    directory.mkdir(parents=True, exist_ok=True)
    out.touch()
    if len(_read_responses(out)) < total:
        environment = run_environment(job.recipe) | QUIET
        if find_device() == "cpu":
            environment |= ON_CPU
        with out.open("rb") as written:

            def tell() -> None:
                nonlocal done
                done += written.read().count(b"}")  # a response has one; other lines are what kills left
                stage.tell(done / total, f"{done} of {total} responses" if done else "starting vLLM")

            run_job("verl_tlt.commands.warmup.engine", asdict(job), directory, environment, tell=tell)
    responses = sorted(_read_responses(out).values(), key=lambda r: (r.prompt, r.sample))
    stage.tell(1.0, f"{len(responses)} of {total} responses")
    if not job.drafting:
        return responses, None
    counted = json.loads((directory / "answer.json").read_text())
    return responses, DraftCounts(counted["drafts"], np.array(counted["accepted"]))


def _read_responses(file: Path) -> dict[tuple[int, int], Response]:
    """The responses generated so far, by (prompt, sample), without a line that a kill cut short."""
    responses = {}
    for line in file.read_bytes().split(b"\n"):
        try:
            response = from_plain(Response, json.loads(line))
        except ValueError:
            continue
        responses[response.prompt, response.sample] = response
    return responses


def as_texts(prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Text]:
    """Each response behind its prompt."""
    texts = []
    for response in responses:
        prompt = prompts[response.prompt]
        texts.append(Text((*prompt.tokens, *response.tokens), len(prompt.tokens), prompt.images))
    return texts


def make_bars(console: Console) -> Progress:
    texts = TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.fields[note]}")
    return Progress(*texts, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


class Stage:
    """Progress of one stage of a command, which begins when this is made."""

    def __init__(self, bars: Progress, name: str, note: str) -> None:
        self.bars = bars
        self._name = name
        self._task = bars.add_task(name, total=1.0, note=note)
        self._began = time.monotonic()
        self._line_at = self._began  # when the last line was printed, and how many tenths were done then
        self._line_tenths = 0
        self._done_before: float | None = None  # share that an earlier try had done

    def tell(self, share: float, note: str) -> None:
        """Show on the bar how much is done. If the output is no terminal, also print a line now and then."""
        now = time.monotonic()
        if self._done_before is None:
            self._done_before = share
        self.bars.update(self._task, completed=share, note=note)
        tenths = int(10 * share)
        line_is_due = tenths > self._line_tenths or now > self._line_at + LINE_S
        if self.bars.console.is_terminal or not line_is_due:
            return
        self._line_tenths = tenths
        self._line_at = now
        spent = now - self._began
        done = share - self._done_before
        left = f", about {spent * (1 - share) / done:.0f} s left" if done else ""
        self.say(f"{note} after {spent:.0f} s{left}")

    def say(self, text: str) -> None:
        say(self.bars.console, f"{self._name}: {text}")


# ------------------------------------------------------------------ in the child


async def _work(job: GenerationJob, directory: Path) -> dict[str, Any]:
    """Generate the responses of `job` that are missing; returns vLLM's counters where a drafter was given."""
    from verl.utils.tokenizer import hf_processor
    from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.metrics.reader import get_metrics_snapshot

    out = directory / RESPONSES
    setup = set_up(job.recipe, job.changes)
    rollout = setup.rollout
    done = _read_responses(out)
    extra: dict[str, Any] = {"disable_log_stats": False}
    if job.drafting:
        extra["speculative_config"] = job.drafting
    processor = hf_processor(setup.model.path) if any(prompt.images for prompt in job.prompts) else None
    async with start(setup, directory, drafting=False, extra=extra) as engine:
        room = asyncio.Semaphore(2 * most_requests(engine.llm))  # images of all requests at once may not fit in memory
        with out.open("a") as stream:

            async def answer(number: int, sample: int) -> None:
                prompt = job.prompts[number]
                async with room:
                    tokens = await decode(  # asked and sampled as verl's agent loops and server do it
                        engine.llm,
                        qwen2_5_vl_dedup_image_tokens(list(prompt.tokens), processor),
                        _media(prompt, job.processor_options),
                        temperature=rollout.temperature,
                        top_p=rollout.top_p,
                        top_k=rollout.top_k,
                        max_tokens=min(rollout.response_length, rollout.max_model_len - len(prompt.tokens)),
                        ignore_eos=bool(rollout.get("ignore_eos", False)),
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                stream.write(json.dumps(asdict(Response(number, sample, tuple(tokens)))) + "\n")
                stream.flush()

            if done or out.stat().st_size:
                stream.write("\n")  # after a line that a kill cut short
            wanted = product(range(len(job.prompts)), range(job.samples))
            await asyncio.gather(*(answer(*place) for place in wanted if place not in done))
        if not job.drafting:
            return {}
        counters: dict[str, Any] = {metric.name: metric for metric in get_metrics_snapshot()}
        return {
            "drafts": int(counters["vllm:spec_decode_num_drafts"].value),
            "accepted": [int(n) for n in counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
        }


def _media(prompt: Prompt, processor_options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of vLLM's prompt for this one's images, as verl's server fills them."""
    if not prompt.images:
        return {}
    images = {"multi_modal_data": {"image": open_images(prompt.images)}}
    return {**images, "mm_processor_kwargs": processor_options} if processor_options else images


if __name__ == "__main__":
    serve_job(lambda job, folder: asyncio.run(_work(from_plain(GenerationJob, job), folder)))
