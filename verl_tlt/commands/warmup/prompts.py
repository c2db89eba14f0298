"""A user's prompts as token ids, in the form the rollout would give them to the policy; and the recipe of that rollout.

Files are verl's own parquet (column `prompt`, chat messages), JSON lines or a JSON array with the same field or plain
text in it, and plain text with one prompt a line. Messages go through the policy's chat template, as verl does it.
A part of the prompts is held out by a hash of its tokens: the same whichever command reads the file.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tlt.checks.models import POLICY, located
from verl_tlt.checks.recipe import CONFIG, ROLLOUT, Recipe, compose, number, read_mapping, select
from verl_tlt.commands.script.run import read_arguments
from verl_tlt.config import MOST, TLTConfigError
from verl_tlt.drafter import DrafterError, files_digest, policy_shape
from verl_tlt.drafter.policy import Model, first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedTokenizerBase

    from verl_tlt.commands.options import EngineOptions

MODEL = "actor_rollout_ref.model"

HELD_OUT = 0.1
"""Share of the prompts that are never trained on."""
MIN_PROMPTS = 16
"""Fewest prompts: responses to fewer are learnt by heart, and nothing is left to judge the drafter on."""


@dataclass(frozen=True)
class PromptForm:
    """How a run makes a prompt from a row of its data."""

    key: str = "prompt"  # the field or column with text or messages; verl's `data.prompt_key`
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template; verl's `data.apply_chat_template_kwargs`."""


AS_IS = PromptForm()


@dataclass(frozen=True)
class Prompts:
    """The prompts of some files, and which of them are for judging."""

    tokens: tuple[tuple[int, ...], ...]  # ids of each prompt; equal prompts once
    digest: str  # sixteen hex digits of the files' content, for provenance
    held_out: frozenset[int]  # numbers of the prompts that are for judging only
    form: PromptForm = AS_IS  # how the prompts were made from the files' rows


def read_prompts(
    sources: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limit: int | None = None,
    least: int = MIN_PROMPTS,
    form: PromptForm = AS_IS,
) -> Prompts:
    """The first `limit` prompts as token ids, without those over `longest` tokens.

    A source is a .parquet, .jsonl, .json or .txt file, or a folder of .parquet files. A `DrafterError` where one is
    missing, unreadable or of another kind, or where all hold fewer than `least` usable prompts.
    """
    files = [file for source in sources for file in _files(source)]
    named = "--prompts " + " ".join(map(str, sources))
    kept: dict[tuple[int, ...], None] = {}
    skipped, where = 0, ""
    for where, row in islice(chain.from_iterable(_rows(file, form.key) for file in files), limit):
        ids = _encode(row, tokenizer, where, form)
        if len(ids) > longest:
            skipped += 1
        elif ids:
            kept[ids] = None
    if not where:
        raise DrafterError(f"{named} is empty.")
    if len(kept) < least:
        long = f"; {skipped} are longer than {longest} tokens, which leaves no room for a response" if skipped else ""
        usable = f"{len(kept)} different usable prompts, but at least {least} are needed"
        raise DrafterError(f"{named} holds {usable}{long}.")
    marks = []  # numbers in [0, 1) that depend on a prompt's tokens alone
    for prompt in kept:
        name = ",".join(map(str, prompt)).encode()
        marks.append(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2.0**64)
    held_out = frozenset(i for i, mark in enumerate(marks) if mark < HELD_OUT) or frozenset({marks.index(min(marks))})
    return Prompts(tuple(kept), files_digest(files), held_out, form)


def load_tokenizer(policy: Model, trusted: bool = False) -> PreTrainedTokenizerBase:
    """The policy's tokenizer; code in its files runs where it is `trusted`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(policy, trust_remote_code=trusted)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise DrafterError(f"--model {policy} holds no tokenizer: {first_line(error)}.") from error


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise DrafterError(f"--prompts {source} does not exist.")
    if source.is_dir():
        if not (files := sorted(file for file in source.rglob("*.parquet") if file.is_file())):
            raise DrafterError(f"--prompts {source} is a folder without .parquet files.")
        return files
    if not source.is_file():
        raise DrafterError(f"--prompts {source} is no ordinary file.")
    if source.suffix.lower() not in (".parquet", ".jsonl", ".json", ".txt"):
        kinds = "must end in .parquet, .jsonl, .json or .txt, or be a folder of .parquet"
        raise DrafterError(f"--prompts {source} {kinds}.")
    return [source]


def _rows(file: Path, key: str) -> Iterator[tuple[str, Any]]:
    """For each prompt its place, for a message, and its row: text, messages, or an object with such a field."""
    kind, number = file.suffix.lower(), 0
    read = {".parquet": _parquet, ".txt": _text}.get(kind, _json)
    try:
        for number, row in enumerate(read(file, key), start=1):
            yield f"--prompts {file}: prompt {number}", row
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DrafterError):
            raise
        after = f" after prompt {number}" if number else ""
        reason = str(error).splitlines()[0].rstrip(".")
        raise DrafterError(f"--prompts {file} is not a readable {kind} file{after}: {reason}.") from error


def _parquet(file: Path, key: str) -> Iterator[Any]:
    with pq.ParquetFile(file) as table:
        if key not in table.schema_arrow.names:
            raise DrafterError(f"--prompts {file} has no column `{key}`.")
        for batch in table.iter_batches(columns=[key]):
            yield from batch.column(0).to_pylist()


def _text(file: Path, key: str) -> Iterator[str]:
    for line in _lines(file):
        if (text := line.decode().removesuffix("\n").removesuffix("\r")).strip():
            yield text


def _json(file: Path, key: str) -> Iterator[Any]:
    """JSON lines, or one array."""
    first = next((line for line in _lines(file) if line.strip()), b"")
    chat = False
    with suppress(ValueError):  # the first line of an array need not be a value
        chat = _is_chat(json.loads(first))
    if chat or not first.lstrip().startswith(b"["):
        yield from (json.loads(line) for line in _lines(file) if line.strip())
    else:
        yield from json.loads(file.read_bytes())


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, which line feeds alone end, without a byte order mark."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            yield line.removeprefix(codecs.BOM_UTF8) if number == 0 else line


def _encode(row: Any, tokenizer: PreTrainedTokenizerBase, where: str, form: PromptForm) -> tuple[int, ...]:
    if isinstance(row, dict):
        if form.key not in row:
            raise DrafterError(f"{where} has no field `{form.key}`.")
        row = row[form.key]
    if isinstance(row, str):
        return tuple(tokenizer(row)["input_ids"])
    if not _is_chat(row):
        raise DrafterError(f"{where} is neither text nor a list of messages with `role` and `content`.")
    if not tokenizer.chat_template and not form.template.get("chat_template"):
        raise DrafterError(f"{where} is a chat, but the policy's tokenizer has no chat template.")
    arguments = {**form.template, "add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(row, **arguments)
    except Exception as error:  # a template is a program, and may raise whatever it likes
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise DrafterError(f"{where} is refused by the policy's chat template: {reason}.") from error
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_chat(row: Any) -> bool:
    chat = row if isinstance(row, list) else []
    return bool(chat) and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in chat)


# ------------------------------------------------------------------ the recipe


@dataclass(frozen=True)
class Run:
    """What `--recipe` says of the run that a drafter is for: policy, prompts, sampling, and how its engines start."""

    recipe: Recipe
    config: DictConfig  # verl's, as the recipe composes it

    def options(self) -> dict[str, Any]:
        """Options of the commands that the recipe decides, by field."""
        named = select(self.config, "data.train_files", [])
        files = [str(file) for file in (named if isinstance(named, list) else [named])]
        if away := next((file for file in files if "://" in file), None):
            raise TLTConfigError(f"data.train_files={away} is on another file system: give --prompts.")
        return {
            "model": Path(self._path(str(select(self.config, POLICY, "")))),
            "prompts": [Path(self._path(file)) for file in files],
            "response_length": number(self.config, f"{ROLLOUT}.response_length", 512),
            "temperature": self._float("temperature", 0.0, MOST),
            "top_p": self._float("top_p", 1e-6, 1.0),
            "top_k": max(0, int(self._float("top_k", -1, MOST))),  # verl's -1: off
            "tensor_parallel": number(self.config, f"{ROLLOUT}.tensor_model_parallel_size", 1),
            "method": str(select(self.config, "tlt.drafter.method") or "eagle3"),
        }

    def form(self) -> PromptForm:
        template = read_mapping(self.config, "data.apply_chat_template_kwargs")
        if own := select(self.config, f"{MODEL}.custom_chat_template"):
            template["chat_template"] = own
        return PromptForm(str(select(self.config, "data.prompt_key", "prompt")), template)

    def tokenizer(self) -> tuple[str, bool]:
        """Where the run's tokenizer is, and whether code in its files may run."""
        place = select(self.config, f"{MODEL}.tokenizer_path") or select(self.config, POLICY, "")
        return self._path(str(place)), bool(select(self.config, f"{MODEL}.trust_remote_code", False))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; a run leaves longer ones out."""
        return number(self.config, f"{ROLLOUT}.prompt_length", 512)

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence of the run's engines, in tokens; None: the recipe says none."""
        return number(self.config, f"{ROLLOUT}.max_model_len", 0) or None

    def _path(self, path: str) -> str:
        """A path as the script's own working directory has it; a name on the hub as it is."""
        local = os.path.join(self.recipe.directory or ".", os.path.expanduser(path))
        return os.path.abspath(local) if os.path.exists(local) else located(path)

    def _float(self, name: str, least: float, most: float) -> float:
        value = select(self.config, f"{ROLLOUT}.{name}", 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise TLTConfigError(f"{ROLLOUT}.{name} must be a number from {least:g} to {most:g}, not {value!r}.")
        return float(value)


def read_for(
    options: EngineOptions,
    sources: Sequence[Path],
    limit: int | None,
    least: int = MIN_PROMPTS,
    form: PromptForm = AS_IS,
) -> Prompts:
    """The prompts that leave room for a response, in the recipe's form, or without a recipe in `form`."""
    positions, run = policy_shape(options.model).max_position_embeddings, read_run(options.recipe, options.run_script)
    if (longest := positions - options.response_length) < 1:
        room = f"no room for a prompt in the policy's max_position_embeddings={positions}"
        raise DrafterError(f"--response-length {options.response_length} leaves {room}.")
    if run is None:
        return read_prompts(sources, load_tokenizer(options.model), longest, limit, least, form)
    longest = min(longest, run.longest_prompt, (run.max_model_len or positions) - 1)
    return read_prompts(sources, load_tokenizer(*run.tokenizer()), longest, limit, least, run.form())


def read_run(words: Sequence[str] | None, run_script: bool = False) -> Run | None:
    return _read(tuple(words), run_script) if words else None


@lru_cache(maxsize=1)
def _read(words: tuple[str, ...], run_script: bool) -> Run:
    recipe = read_arguments(words, CONFIG, run_script)
    return Run(recipe, compose(recipe.overrides, recipe.config))
