"""The prompts that a run would give its policy, as token ids and images.

verl's own code reads and builds them: its dataset class (`data.custom_cls` included) reads the files, and its agent
loop makes the first request of each row, with the run's chat template and tools. It is recorded, and not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import open_dict

from verl_tlt.checks.recipe import ROLLOUT, number
from verl_tlt.commands.warmup.run import composed, longest_context
from verl_tlt.drafter import DrafterError, files_digest, policy_shape
from verl_tlt.drafter.held_out import digest_of, mark_of
from verl_tlt.files.disk import replacing

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from PIL.Image import Image

    from verl_tlt.commands.options import EngineOptions

HELD_OUT = 0.1
"""Share of the prompts that are never trained on."""
MIN_PROMPTS = 16
"""Fewest prompts: responses to fewer are learnt by heart, and nothing is left to judge the drafter on."""
WIRING = "verl.utils.tokenizer.continuous_token_wiring"
"""verl's logger that warns at each prompt of a policy whose family it does not know, such as Llama."""


@dataclass(frozen=True)
class Prompt:
    """The first request that an agent loop makes to an engine for a row of the data."""

    tokens: tuple[int, ...]
    """Token ids; an image has as many as the policy sees of it."""
    images: tuple[str, ...] = ()
    """PNG files of its images, each named by its content."""

    @property
    def content(self) -> tuple[int | str, ...]:
        """Its tokens and its images' names, without their folder: equal for equal prompts."""
        return (*self.tokens, *(Path(file).name for file in self.images))


@dataclass(frozen=True)
class Prompts:
    """The prompts of some files, and which of them are for judging."""

    all: tuple[Prompt, ...]
    """Each prompt; equal prompts once."""
    files_digest: str
    """Sixteen hex digits of the files' content."""
    held_out: frozenset[int]
    """Numbers of the prompts that are for judging only."""
    with_media: int = 0
    """Rows left out because they have videos or sound."""
    dated: str = ""
    """What follows from a chat template that writes today's date; empty: it does not."""

    @property
    def digest(self) -> str:
        """Sixteen hex digits of the prompts' content, and of which are held out."""
        content = tuple(prompt.content for prompt in self.all), sorted(self.held_out)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def read_prompts(options: EngineOptions, images: Path, limit: int | None = None, least: int = MIN_PROMPTS) -> Prompts:
    """`limit` different prompts of the options' files, without those that leave no room for a response.

    They are drawn from all rows of the run, the same ones in every call. `images` is the folder for their images; it is
    made if there are any. A `DrafterError` says that a file is missing or unreadable, or that all hold fewer than
    `least` usable prompts.
    """
    files = [Path(file) for file in options.prompts]  # type: ignore[attr-defined]
    named = "--prompts " + " ".join(map(str, files))
    for file in files:
        if not file.is_file():
            raise DrafterError(f"--prompts {file} {'is not a file' if file.exists() else 'does not exist'}.")
    for file in files:
        if _is_empty(file):
            raise DrafterError(f"--prompts {file} is empty.")
    positions = policy_shape(options.model).max_position_embeddings
    longest = positions - options.response_length
    if longest < 1:
        room = f"no room for a prompt in the policy's max_position_embeddings={positions}"
        raise DrafterError(f"--response-length {options.response_length} leaves {room}.")
    longest = min(longest, (longest_context(options) or positions) - 1)
    images = images.absolute()  # the recipe's script may start elsewhere
    with composed(options, _changes(files)) as config:
        if config.data.get("seed") is None:  # by which verl shuffles before it takes `data.train_max_samples`
            with open_dict(config):
                config.data.seed = 0
        longest = min(longest, number(config, f"{ROLLOUT}.prompt_length", 512))
        asked, with_media, dated = asyncio.run(_first_requests(config, images, limit, named))
    kept = [r for r in asked if 0 < len(r.tokens) <= longest]
    if len(kept) < least:
        too_few = f"{named} holds {len(kept)} different usable prompts, but at least {least} are needed"
        if long := sum(len(r.tokens) > longest for r in asked):
            too_few += f"; {long} are longer than {longest} tokens, which leaves no room for a response"
        if empty := sum(not r.tokens for r in asked):
            too_few += f"; {empty} are empty in the policy's chat template"
        if with_media:
            too_few += f"; {with_media} have videos or sound, which a warm-up leaves out"
        if limit and len(asked) == limit:
            too_few += f"; --limit {limit} takes no more"
        raise DrafterError(f"{too_few}.")
    return Prompts(tuple(kept), files_digest(files), _held_out(kept), with_media, dated)


def _is_empty(file: Path) -> bool:
    """Whether a file has no bytes, or no rows of parquet; verl's dataset fails on either."""
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    if file.stat().st_size == 0:
        return True
    if file.suffix != ".parquet":
        return False
    try:
        return bool(pq.ParquetFile(file).metadata.num_rows == 0)
    except ArrowException:
        return False  # verl's dataset says what is wrong with it


def _changes(files: Sequence[Path]) -> dict[str, Any]:
    """Values of verl's config for these files."""
    return {
        "data.train_files": [str(file.absolute()) for file in files],
        f"{ROLLOUT}.trace.backend": None,  # nothing is logged elsewhere
        "distillation.enabled": False,  # no teacher is asked
    }


def _held_out(prompts: Sequence[Prompt]) -> frozenset[int]:
    """Numbers of the prompts that are for judging: a tenth, chosen as a run chooses, but for prompts with images."""
    marks = []
    for prompt in prompts:
        images = [int(Path(file).stem[:15], 16) for file in prompt.images]  # a file is named by its content
        marks.append(mark_of(digest_of([*prompt.tokens, *images])))
    chosen = frozenset(i for i, mark in enumerate(marks) if mark < HELD_OUT)
    return chosen or frozenset({marks.index(min(marks))})


def open_images(files: Sequence[str]) -> list[Image]:
    """The images of a prompt's files, in memory."""
    from PIL import Image

    return [Image.open(file).convert("RGB") for file in files]


# ------------------------------------------------------------------ verl's own code


class _Recorded(BaseException):
    """Raised to leave an agent loop with its first request. An `except Exception` of the loop does not catch it."""

    def __init__(self, prompt: Prompt | None) -> None:
        super().__init__()
        self.prompt = prompt


class _Recorder:
    """Takes the place of the agent loops' engine client: ends a loop at its first request, whose images it keeps."""

    def __init__(self, images: Path) -> None:
        self._images = images

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], **more: Any) -> None:
        if more.get("video_data") is not None or more.get("audio_data") is not None:
            raise _Recorded(None)
        images = tuple(self._kept(image) for image in more.get("image_data") or ())
        raise _Recorded(Prompt(tuple(prompt_ids), images))

    def _kept(self, image: Image) -> str:
        content = io.BytesIO()
        image.save(content, "PNG")  # which loses nothing
        file = self._images / f"{hashlib.sha256(content.getvalue()).hexdigest()[:32]}.png"
        if not file.exists():
            self._images.mkdir(parents=True, exist_ok=True)
            with replacing(file) as stream:
                stream.write(content.getvalue())
        return str(file)


@contextlib.contextmanager
def _as_drafter_error(sentence: str) -> Iterator[None]:
    """Make a `DrafterError`, which begins with `sentence`, of what verl, a dataset, a template or a loop raises."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".") or type(error).__name__
        raise DrafterError(f"{sentence}: {reason}.") from error


async def _first_requests(
    config: DictConfig, images: Path, limit: int | None, named: str
) -> tuple[list[Prompt], int, str]:
    """`limit` different requests with which rows begin, drawn from all rows: files may be sorted.

    Also returns how many of the rows that were looked at have videos or sound, and so no request, and `Prompts.dated`.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    with _as_drafter_error("verl cannot prepare the agent loop of this policy"):
        worker = AgentLoopWorker(config, _Recorder(images))
    logging.getLogger(WIRING).setLevel(logging.ERROR)
    data = _dataset(config, worker, named)
    requests: dict[Prompt, None] = {}  # each once, in the order of drawing
    with_media = 0
    for i in np.random.default_rng(0).permutation(len(data)).tolist():
        request = await _first_request(worker, config, data, i, f"{named}: prompt {i + 1}")
        if request is None:
            with_media += 1
        else:
            requests[request] = None
        if len(requests) == limit:
            break
    dated = ""
    if "date_string" not in (config.data.get("apply_chat_template_kwargs") or {}):
        dated = _dated(str(getattr(worker.tokenizer, "chat_template", None)))
    return list(requests), with_media, dated


def _dataset(config: DictConfig, worker: Any, named: str) -> Any:
    """verl's dataset of the run's training data; a `DrafterError` where it has no prompts. `named` are its files."""
    from verl.trainer.ppo.utils import create_rl_dataset

    silent = contextlib.redirect_stdout(io.StringIO())  # verl prints counts
    with silent, _as_drafter_error(f"{named} cannot be read by verl's dataset"):
        most = config.data.get("train_max_samples", -1)
        data = create_rl_dataset(
            config.data.train_files, config.data, worker.tokenizer, worker.processor, max_samples=most
        )
    if not len(data):
        raise DrafterError(f"{named} is empty, or all its prompts are longer than data.max_prompt_length.")
    columns = getattr(getattr(data, "dataframe", None), "column_names", None)
    key = config.data.get("prompt_key", "prompt")
    if columns is not None and key not in columns:
        others = f"its columns: {', '.join(columns)}"
        raise DrafterError(f"{named} has no `{key}` ({others}): add data.prompt_key=NAME for the one with the prompts.")
    return data


def _dated(template: str) -> str:
    """What follows from a chat template that writes today's date (`Prompts.dated`); empty: this one does not."""
    if "strftime_now" not in template:
        return ""
    said = (
        "The chat template writes today's date, so an interrupted warm-up cannot go on tomorrow, and a later run holds "
        "out other prompts."
    )
    if "date_string" not in template:
        return said
    return (
        f'{said} To prevent this, add +data.apply_chat_template_kwargs.date_string="26 Jul 2024" here and in the run.'
    )


async def _first_request(worker: Any, config: DictConfig, data: Any, number: int, where: str) -> Prompt | None:
    with _as_drafter_error(f"{where} cannot be read by verl's dataset"):
        row = data[number]
    loop = row.pop("agent_name", None) or config.actor_rollout_ref.rollout.agent.default_agent_loop
    row.pop("dummy_tensor", None)
    if not _is_chat(row.get("raw_prompt")):
        example = '[{"role": "user", "content": "..."}]'
        raise DrafterError(f"{where} is no list of messages with `role` and `content`, such as {example}.")
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    try:
        with _as_drafter_error(f"{where} is refused by verl's {loop}"):
            await worker._run_agent_loop(sampling, trajectory, agent_name=loop, trace=False, **row)
    except _Recorded as recorded:
        return recorded.prompt
    raise DrafterError(f"{where}: verl's {loop} asked the engine for nothing.")


def _is_chat(messages: Any) -> bool:
    chat = messages if isinstance(messages, list) else []
    return bool(chat) and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in chat)
