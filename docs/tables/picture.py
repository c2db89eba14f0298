"""The README's picture: seconds for 1,000 tokens of every RL step of the end-to-end benchmark, by arm.

Drawn by `python docs/generate.py` from benchmarks/results/e2e.json. The file keeps a digest of the rows it shows, by
which a test sees that it is of the file as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tables.page import load

PICTURE = Path(__file__).parents[1] / "picture.png"
NAMES = {
    "stock": "stock verl", "tlt-fresh": "TLT, random drafter", "tlt": "TLT, trained drafter",
    "lost": "drafter lost", "stale": "drafter of an earlier policy", "random": "random drafter",
}  # fmt: skip
COLORS = {"stock": "#888888", "vllm": "#0072B2", "tlt": "#E69F00"}

Rows = dict[str, list[tuple[float, float, float]]]
"""Rollout seconds, seconds of the whole step, and tokens of each step, by arm."""


def shown() -> Rows:
    """What the picture shows, in its order: stock verl, vLLM's own speculation at one K, TLT."""
    found: Rows = {}
    for turn in load("e2e")["turns"]:
        steps = [(step["rollout_s"], step["step_s"], step["tokens"]) for step in turn["steps"]]
        found.setdefault(turn["arm"], []).extend(steps)
    names = [arm for arm in found if re.fullmatch(r"vllm-\d+(-\w+)?", arm)]
    names.sort(key=lambda arm: (arm.count("-"), arm))
    return {arm: found[arm] for arm in ("stock", *names, "tlt-fresh", "tlt")}


def digest(rows: Rows) -> str:
    """A fingerprint of what is drawn."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def drawn(path: Path = PICTURE) -> str:
    """The fingerprint of what the file shows; empty if there is no file."""
    from PIL import Image

    return str(Image.open(path).info["Description"]) if path.exists() else ""


def label(arm: str) -> str:
    """What the picture calls an arm."""
    if arm in NAMES:
        return NAMES[arm]
    _, k, *state = arm.split("-")
    return f"vLLM, K={k}" + (f", {NAMES[state[0]]}" if state else "")


def draw(rows: Rows, path: Path = PICTURE) -> None:
    """Two panels, rollout and whole step: a dot for each RL step, a bar for all of an arm's steps together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 0.32 * len(rows)), layout="constrained")
    panels = zip(figure.subplots(1, 2, sharey=True), ("Rollout", "Whole step"), strict=True)
    for column, (ax, title) in enumerate(panels):
        for y, (arm, steps) in enumerate(rows.items()):
            tokens = sum(step[2] for step in steps)
            pooled, color = 1000 * sum(step[column] for step in steps) / tokens, COLORS[arm.partition("-")[0]]
            ax.barh(y, pooled, 0.7, color=color, alpha=0.45)
            ax.plot([1000 * step[column] / step[2] for step in steps], [y] * len(steps), ".", color=color)
            ax.text(0.02 * pooled, y, f"{pooled:.1f} s", va="center", fontsize=8)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel("seconds for 1,000 tokens", fontsize=9)
        ax.set_yticks(range(len(rows)), [label(arm) for arm in rows], fontsize=9)
        ax.tick_params(axis="x", labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=110, metadata={"Description": digest(rows), "Software": None})
