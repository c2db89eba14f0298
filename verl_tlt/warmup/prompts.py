"""A user's prompts as token ids, in the form the rollout would give them to the policy.

Three files are read: verl's own parquet (column `prompt`, chat messages), JSON lines with the same field or plain
text in it, and plain text with one prompt a line. Messages go through the policy's chat template, as verl does it.
A part of the prompts is held out by a hash of its tokens: the same whichever command reads the file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tlt.drafter import DrafterError, files_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1
"""Share of the prompts that are never trained on."""
MIN_PROMPTS = 16
"""Responses to fewer would be learnt by heart, and nothing would be left to judge the drafter on."""


@dataclass(frozen=True)
class Prompts:
    """What a file held, and which part of it is for judging."""

    tokens: tuple[tuple[int, ...], ...]
    """Ids of each prompt; equal prompts once."""
    digest: str
    """Sixteen hex digits of the file's content, for provenance."""
    held_out: frozenset[int]
    """Numbers of the prompts that are for judging only."""


def read_prompts(
    file: Path, tokenizer: PreTrainedTokenizerBase, longest: int, limit: int | None = None, least: int = MIN_PROMPTS
) -> Prompts:
    """The first `limit` prompts of a .parquet, .jsonl or .txt file as token ids, without those over `longest` tokens.

    Raises:
        DrafterError: the file is missing, unreadable, of another kind, or holds fewer than `least` usable prompts.
    """
    if not file.is_file():
        raise DrafterError(f"--prompts {file} does not exist.")
    if not (rows := _rows(file)):
        raise DrafterError(f"--prompts {file} is empty.")
    kept: dict[tuple[int, ...], None] = {}
    skipped = 0
    for number, row in enumerate(rows[:limit]):
        ids = _encode(row, tokenizer, f"--prompts {file}: prompt {number + 1}")
        if len(ids) > longest:
            skipped += 1
        elif ids:
            kept[ids] = None
    if len(kept) < least:
        long = f"; {skipped} are longer than {longest} tokens, which leaves no room for a response" if skipped else ""
        raise DrafterError(
            f"--prompts {file} holds {len(kept)} different usable prompts, but at least {least} are needed{long}."
        )
    marks = [_fraction(prompt) for prompt in kept]
    held_out = frozenset(i for i, mark in enumerate(marks) if mark < HELD_OUT) or frozenset({marks.index(min(marks))})
    return Prompts(tuple(kept), files_digest([file]), held_out)


def load_tokenizer(policy: Path) -> PreTrainedTokenizerBase:
    """The policy's tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(policy)
    except (OSError, ValueError) as error:
        raise DrafterError(f"--model {policy} holds no tokenizer: {str(error).splitlines()[0]}") from error


def _rows(file: Path) -> list[Any]:
    """Each prompt as it is in the file: text, a list of messages, or an object with the field `prompt`."""
    kind = file.suffix.lower()
    if kind not in (".parquet", ".jsonl", ".json", ".txt"):
        raise DrafterError(f"--prompts {file} must end in .parquet, .jsonl or .txt.")
    try:
        if kind == ".parquet":
            return pq.read_table(file, columns=["prompt"]).to_pylist()
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        return lines if kind == ".txt" else [json.loads(line) for line in lines]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DrafterError(f"--prompts {file} is not a readable {kind} file: {str(error).splitlines()[0]}.") from error


def _encode(row: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[int, ...]:
    if isinstance(row, dict):
        if "prompt" not in row:
            raise DrafterError(f"{where} has no field `prompt`.")
        row = row["prompt"]
    if isinstance(row, str):
        return tuple(tokenizer(row)["input_ids"])
    if isinstance(row, list) and row and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in row):
        if not tokenizer.chat_template:
            raise DrafterError(f"{where} is a chat, but the policy's tokenizer has no chat template.")
        text = tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    raise DrafterError(f"{where} is neither text nor a list of messages with `role` and `content`.")


def _fraction(tokens: tuple[int, ...]) -> float:
    """A number in 0..1 that depends on the tokens alone."""
    name = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2.0**64
