"""A user's prompts as token ids, in the form the rollout would give them to the policy.

Read are verl's own parquet (column `prompt`, chat messages), JSON lines or a JSON array with the same field or plain
text in it, and plain text with one prompt a line. Messages go through the policy's chat template, as verl does it.
A part of the prompts is held out by a hash of its tokens: the same whichever command reads the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tlt.drafter import DrafterError, files_digest
from verl_tlt.drafter.policy import Model
from verl_tlt.files.json_files import parse, read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1
"""Share of the prompts that are never trained on."""
MIN_PROMPTS = 16
"""Responses to fewer would be learnt by heart, and nothing would be left to judge the drafter on."""


@dataclass(frozen=True)
class PromptForm:
    """How a run makes a prompt of a row of its data."""

    key: str = "prompt"
    """The field or column with text or messages; verl's `data.prompt_key`."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template; verl's `data.apply_chat_template_kwargs`."""


AS_IS = PromptForm()


@dataclass(frozen=True)
class Prompts:
    """What a file held, and which part of it is for judging."""

    tokens: tuple[tuple[int, ...], ...]
    """Ids of each prompt; equal prompts once."""
    digest: str
    """Sixteen hex digits of the file's content, for provenance."""
    held_out: frozenset[int]
    """Numbers of the prompts that are for judging only."""
    form: PromptForm = AS_IS
    """How they were made of the file's rows."""

    @property
    def ids_digest(self) -> str:
        """Sixteen hex digits of the token ids: what responses depend on."""
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]


def read_prompts(
    sources: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limit: int | None = None,
    least: int = MIN_PROMPTS,
    form: PromptForm = AS_IS,
) -> Prompts:
    """The first `limit` prompts as token ids, without those over `longest` tokens.

    A source is a .parquet, .jsonl, .json or .txt file, or a folder of .parquet files.

    Raises:
        DrafterError: a source is missing, unreadable, of another kind, or all hold fewer than `least` usable prompts.
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
        raise DrafterError(
            f"{named} holds {len(kept)} different usable prompts, but at least {least} are needed{long}."
        )
    marks = [_fraction(prompt) for prompt in kept]
    held_out = frozenset(i for i, mark in enumerate(marks) if mark < HELD_OUT) or frozenset({marks.index(min(marks))})
    return Prompts(tuple(kept), files_digest(files), held_out, form)


def load_tokenizer(policy: Model, trusted: bool = False) -> PreTrainedTokenizerBase:
    """The policy's tokenizer; code in its files runs where it is `trusted`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(policy, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise DrafterError(f"--model {policy} holds no tokenizer: {str(error).splitlines()[0]}") from error


def _files(source: Path) -> list[Path]:
    """The files of one source."""
    if not source.exists():
        raise DrafterError(f"--prompts {source} does not exist.")
    if source.is_dir():
        if not (files := sorted(file for file in source.rglob("*.parquet") if file.is_file())):
            raise DrafterError(f"--prompts {source} is a folder without .parquet files.")
        return files
    if not source.is_file():
        raise DrafterError(f"--prompts {source} is no ordinary file.")
    if source.suffix.lower() not in (".parquet", ".jsonl", ".json", ".txt"):
        raise DrafterError(
            f"--prompts {source} must end in .parquet, .jsonl, .json or .txt, or be a folder of .parquet."
        )
    return [source]


def _rows(file: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Where each prompt is, for a message, and the prompt: text, messages, or an object with such a field."""
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
    for line in read_lines(file):
        if (text := line.decode().removesuffix("\n").removesuffix("\r")).strip():
            yield text


def _json(file: Path, key: str) -> Iterator[Any]:
    """JSON lines, or one array."""
    first = next((line for line in read_lines(file) if line.strip()), b"")
    if first.lstrip().startswith(b"["):
        try:
            value = parse(b"".join(read_lines(file)))
        except ValueError:  # lines with a chat each, or neither
            value = None
        if isinstance(value, list) and not _is_chat(value):
            yield from value
            return
    yield from (parse(line) for line in read_lines(file) if line.strip())


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
    asked = {**form.template, "add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(row, **asked)
    except Exception as error:  # a template is a program, and may raise whatever it likes
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise DrafterError(f"{where} is refused by the policy's chat template: {reason}.") from error
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_chat(row: Any) -> bool:
    chat = row if isinstance(row, list) else []
    return bool(chat) and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in chat)


def _fraction(tokens: tuple[int, ...]) -> float:
    """A number in 0..1 that depends on the tokens alone."""
    name = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2.0**64
