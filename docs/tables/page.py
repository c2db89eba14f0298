"""Reads the files of results and writes Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_tlt.commands.compare.result import faster

FILES = Path(__file__).parents[2] / "benchmarks" / "results"


def load(name: str) -> Any:
    """The contents of one file of results."""
    return json.loads((FILES / f"{name}.json").read_text())


def recorded(name: str) -> bool:
    """Whether that file of results is there."""
    return (FILES / f"{name}.json").exists()


def source(name: str) -> str:
    """A line with the file, the day, and the commits whose code was measured."""
    found = load(name)
    commits = " and ".join(commit[:8] for commit in found.get("commits") or [found["machine"]["commit"]])
    return f"[{name}.json]({name}.json), {found['machine']['date'][:10]}, commit {commits}:\n\n"


def rows(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return "|" + "|".join(f" {cell} " if str(cell) else " " for cell in cells) + "|\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, body))


def two_places(value: float | None) -> str:
    """A figure, such as an accept length; empty: nothing was measured."""
    return "" if value is None else f"{value:.2f}"


def per_token(found: Mapping[str, Any], arm: str, what: str) -> str:
    """How many times as fast as stock an arm's "rollout" or "step" is per token, adjusted for lengths where it can be.

    `found`: a file of `benchmarks.e2e`.
    """
    if arm in found.get("adjusted", {}):
        return faster(dict(zip(("pooled", "low", "high"), found["adjusted"][arm][what], strict=True)))
    return faster(found["ratios"][arm][{"rollout": "rollout_per_token", "step": "e2e_per_token"}[what]])
