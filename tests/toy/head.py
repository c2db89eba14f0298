"""A drafter for the toy, made as the docs recommend: `verl-tlt warmup` on the policy's own responses."""

import random
from pathlib import Path
from typing import Any

from tests.toy.assets import AUX_LAYERS, TRAIN_ROWS, demo_width, prompt_row
from verl_cpu.dtype import find_dtype

DRAFT_LENGTH = 7
"""Tokens per draft that its accept length is for."""


def warmup_command(policy: str, prompts: str, drafter: str, *until: str) -> list[str]:
    """The command line that makes a drafter of a policy from a file of prompts, `until` a limit of its."""
    given = ("--model", policy, "--prompts", prompts, "--out", drafter)
    layers = ",".join(map(str, AUX_LAYERS[demo_width(find_dtype())]))
    options = (
        *("--response-length", "1400", "--draft-length", str(DRAFT_LENGTH), "--aux-layers", layers),
        *("--intermediate-size", "1024", "--batch-tokens", "512", "--learning-rate", "2e-3"),
        *("--epochs", "100", *until),
    )  # fmt: skip
    return ["verl-tlt", "warmup", *given, *options]


def other_prompts(file: Path, count: int) -> None:
    """Write so many prompts of the task: none twice, and none of those that a run trains on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random("train 0")  # as `write_rows` draws them
    seen = {_text(prompt_row(rng, "train", i)) for i in range(TRAIN_ROWS)}
    rng = random.Random("warm-up")
    found: list[dict[str, Any]] = []
    while len(found) < count:
        row = prompt_row(rng, "train", len(found))
        if (text := _text(row)) not in seen:
            seen.add(text)
            found.append(row)
    pq.write_table(pa.Table.from_pylist(found), file)


def _text(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])
