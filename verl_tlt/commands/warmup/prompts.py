"""The prompts that a run would give its policy, as token ids.

verl's own code reads and builds them: its dataset class (`data.custom_cls` included) reads the files, and its agent
loop makes the first request of each row, with the run's chat template and tools. It is recorded, and not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt.checks.recipe import ROLLOUT, number
from verl_tlt.commands.warmup.run import config_of, longest_context
from verl_tlt.drafter import DrafterError, files_digest, policy_shape
from verl_tlt.drafter.policy import first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tlt.commands.options import EngineOptions

HELD_OUT = 0.1
"""Share of the prompts that are never trained on."""
MIN_PROMPTS = 16
"""Fewest prompts: responses to fewer are learnt by heart, and nothing is left to judge the drafter on."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of some files, and which of them are for judging."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each prompt; equal prompts once."""
    files_digest: str
    """Sixteen hex digits of the files' content."""
    held_out: frozenset[int]
    """Numbers of the prompts that are for judging only."""
    with_media: int = 0
    """Rows left out because they have images, videos or sound."""

    @property
    def digest(self) -> str:
        """Sixteen hex digits of the prompts' tokens."""
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]


def read_prompts(options: EngineOptions, limit: int | None = None, least: int = MIN_PROMPTS) -> Prompts:
    """The first `limit` prompts of the options' files, without those that leave no room for a response.

    A `DrafterError` says that a file is missing or unreadable, or that all hold fewer than `least` usable prompts.
    """
    files = [Path(file) for file in options.prompts]  # type: ignore[attr-defined]
    named = "--prompts " + " ".join(map(str, files))
    if missing := next((file for file in files if not file.is_file()), None):
        raise DrafterError(f"--prompts {missing} {'is not a file' if missing.exists() else 'does not exist'}.")
    config, longest = _config(options, files)
    with options.recipe().place():
        requests = asyncio.run(_first_requests(config, limit, named))
    kept = dict.fromkeys(r.tokens for r in requests if r.tokens and len(r.tokens) <= longest and not r.has_media)
    with_media = sum(r.has_media for r in requests)
    if len(kept) < least:
        long = sum(len(r.tokens) > longest for r in requests)
        why = f"; {long} are longer than {longest} tokens, which leaves no room for a response" if long else ""
        if empty := sum(not r.tokens for r in requests):
            why += f"; {empty} are empty in the policy's chat template"
        why += f"; {with_media} have images, videos or sound, which a warm-up leaves out" if with_media else ""
        usable = f"{len(kept)} different usable prompts, but at least {least} are needed"
        raise DrafterError(f"{named} holds {usable}{why}.")
    return Prompts(tuple(kept), files_digest(files), _held_out(list(kept)), with_media)


def _config(options: EngineOptions, files: Sequence[Path]) -> tuple[DictConfig, int]:
    """verl's config for these files, and the tokens of the longest prompt that leaves room for a response."""
    positions = policy_shape(options.model).max_position_embeddings
    if (longest := positions - options.response_length) < 1:
        room = f"no room for a prompt in the policy's max_position_embeddings={positions}"
        raise DrafterError(f"--response-length {options.response_length} leaves {room}.")
    changes: dict[str, Any] = {
        "data.train_files": [str(file.absolute()) for file in files],
        f"{ROLLOUT}.trace.backend": None,  # nothing is logged elsewhere
        "distillation.enabled": False,  # no teacher is asked
    }
    if not options.names_a_run():
        changes |= {"data.max_prompt_length": positions, f"{ROLLOUT}.prompt_length": positions}
    config = config_of(options, changes)
    own = number(config, f"{ROLLOUT}.prompt_length", 512), (longest_context(options) or positions) - 1
    return config, min(longest, *own)


def _held_out(prompts: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """Numbers of the prompts that are for judging: a tenth, chosen by a hash of a prompt's tokens alone."""
    marks = []  # in [0, 1)
    for prompt in prompts:
        name = ",".join(map(str, prompt)).encode()
        marks.append(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2.0**64)
    return frozenset(i for i, mark in enumerate(marks) if mark < HELD_OUT) or frozenset({marks.index(min(marks))})


# ------------------------------------------------------------------ verl's own code


@dataclass(frozen=True)
class Request:
    """What an agent loop first asks an engine for a row of the data."""

    tokens: tuple[int, ...]
    has_media: bool


class _Recorded(BaseException):
    """Leaves an agent loop with its first request; no `except Exception` of the loop stops it."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class _Recorder:
    """Stands where agent loops have their client of the engines."""

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], **more: Any) -> None:
        media = any(more.get(kind) is not None for kind in ("image_data", "video_data", "audio_data"))
        raise _Recorded(Request(tuple(prompt_ids), media))


async def _first_requests(config: DictConfig, limit: int | None, named: str) -> list[Request]:
    """The first request of each of the first `limit` rows, in the order of the files."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.utils import create_rl_dataset

    try:
        worker = AgentLoopWorker(config, _Recorder())
    except Exception as error:  # whatever the tokenizer's and the tools' libraries raise
        raise DrafterError(f"verl cannot prepare the agent loop of this policy: {first_line(error)}.") from error
    with contextlib.redirect_stdout(io.StringIO()):  # verl prints counts
        try:
            most = config.data.get("train_max_samples", -1)
            data = create_rl_dataset(
                config.data.train_files, config.data, worker.tokenizer, worker.processor, max_samples=most
            )
        except Exception as error:  # whatever the dataset's libraries raise
            raise DrafterError(f"{named} cannot be read by verl's dataset: {first_line(error)}.") from error
    if not len(data):
        raise DrafterError(f"{named} is empty, or all its prompts are longer than data.max_prompt_length.")
    columns = getattr(getattr(data, "dataframe", None), "column_names", None)
    if columns is not None and (key := config.data.get("prompt_key", "prompt")) not in columns:
        raise DrafterError(f"{named} has no `{key}`, which verl reads by data.prompt_key.")
    rows = range(min(len(data), limit or len(data)))
    return [await _first_request(worker, config, data[i], f"{named}: prompt {i + 1}") for i in rows]


async def _first_request(worker: Any, config: DictConfig, row: dict[str, Any], where: str) -> Request:
    loop = row.pop("agent_name", None) or config.actor_rollout_ref.rollout.agent.default_agent_loop
    row.pop("dummy_tensor", None)
    if not _is_chat(row.get("raw_prompt")):
        raise DrafterError(f"{where} is no list of messages with `role` and `content`.")
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    try:
        await worker._run_agent_loop(sampling, trajectory, agent_name=loop, trace=False, **row)
    except _Recorded as recorded:
        return recorded.request
    except Exception as error:  # a chat template or an agent loop may raise whatever it likes
        reason = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".") or type(error).__name__
        raise DrafterError(f"{where} is refused by verl's {loop}: {reason}.") from error
    raise DrafterError(f"{where}: verl's {loop} asked the engine for nothing.")


def _is_chat(messages: Any) -> bool:
    chat = messages if isinstance(messages, list) else []
    return bool(chat) and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in chat)
