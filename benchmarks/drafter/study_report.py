"""From what the study's drafters were served with to `drafter_study.json` and its summary; docs/figures.py draws it.

    python -m benchmarks.drafter.study_report --out study --json benchmarks/results/drafter_study.json

Everything is of a real engine (`benchmarks.drafter.serve`): accept length is tokens per pass of the target, with the
draft lengths that `live_table` chose and with steps without a draft; speed is tokens per second. Two arms are compared
run by run, sums over its steps, and the interval is over runs, by Student's t.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from benchmarks.drafter.serve import NONE
from benchmarks.drafter.study import CONFIG, SESSION_STEPS, STARTS
from benchmarks.drafter.trajectory import LEARNING_RATE, PROMPTS, SAMPLES, STEPS, file_of, lines_of, read_options
from benchmarks.gpu.parts import machine
from demo.machine import find_dtype

ARMS = ("frozen", "online", "extra")
COMPARED = (("online", "frozen"), ("online", "extra"), ("extra", "frozen"), ("online", NONE), ("frozen", NONE))
LATE = 0.7
"""The summary compares all served steps, and those in the last three tenths of the run."""

Row = dict[str, Any]


def accept_length(rows: Iterable[Row]) -> float:
    """Tokens per pass of the target, all rows pooled."""
    rows = list(rows)
    return sum(row["decoded"] for row in rows) / sum(row["passes"] for row in rows)


def speed(rows: Iterable[Row]) -> float:
    rows = list(rows)
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


FIGURES = {"accept_length": accept_length, "speed": speed}


def chosen(rows: Iterable[Row], start: str, arm: str, seed: int | None = None, first: float = 0) -> list[Row]:
    """Rows of an arm, of one run or of all, from a step on."""
    wanted = ("" if arm == NONE else start, arm)
    return [
        row
        for row in rows
        if (row["start"], row["arm"]) == wanted and seed in (None, row["seed"]) and row["step"] >= first
    ]


def compare(rows: list[Row], start: str, pair: tuple[str, str], figure: str, first: float = 0) -> dict[str, float]:
    """The first arm's figure over the second's, minus one, run by run: mean, and 95 % over runs."""
    of = FIGURES[figure]
    ratios = []
    for seed in sorted({row["seed"] for row in rows}):
        above, below = (of(chosen(rows, start, arm, seed, first)) for arm in pair)
        ratios.append(above / below - 1.0)
    mean, half = spread(ratios)
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def spread(values: list[float]) -> tuple[float, float]:
    student = scipy.stats.t.ppf(0.975, len(values) - 1)
    return float(np.mean(values)), float(student * scipy.stats.sem(values))


def summary(rows: list[Row], steps: int) -> dict[str, Any]:
    """By start: the arms' figures late in the run, and how they compare."""
    late = LATE * steps
    out: dict[str, Any] = {}
    for start in STARTS:
        out[start] = {
            f"{arm}_vs_{other}_{figure}_{when}": compare(rows, start, (arm, other), figure, first)
            for arm, other in COMPARED
            for figure in FIGURES
            for when, first in (("all", 0.0), ("late", late))
        }
        for arm in ARMS:
            out[start][f"{arm}_late"] = round(accept_length(chosen(rows, start, arm, None, late)), 4)
            out[start][f"{arm}_first"] = round(accept_length(r for r in chosen(rows, start, arm) if not r["step"]), 4)
    return out


def rewards(out: Path, seeds: list[int], window: int = 10) -> dict[str, Any]:
    """Mean reward of the first and last steps of each run, and how far it rose."""
    runs = [[row["reward"] for row in lines_of(file_of(out, seed))] for seed in seeds]
    ends = [(float(np.mean(run[:window])), float(np.mean(run[-window:]))) for run in runs]
    return {
        "by_step": [[round(reward, 4) for reward in run] for run in runs],
        "first": [round(first, 4) for first, _ in ends],
        "last": [round(last, 4) for _, last in ends],
        "rose_by": round(float(np.mean([last - first for first, last in ends])), 4),
        "steps_averaged": window,
    }


def decisions(out: Path, seeds: list[int]) -> dict[str, Any]:
    """What the gate said, and the tokens of all sessions, by start and run."""
    found: dict[str, Any] = {"decisions": {}, "trained_tokens": {}}
    for start in STARTS:
        runs = [lines_of(out / "variants" / f"{start}-{seed}.jsonl") for seed in seeds]
        found["decisions"][start] = [dict(Counter(row.get("decision", "no session") for row in run)) for run in runs]
        found["trained_tokens"][start] = [sum(row["trained_tokens"] for row in run) for run in runs]
    return found


def main() -> None:
    options = read_options(__doc__, json={"type": Path, "required": True})
    rows = [row for seed in options.seeds for row in lines_of(options.out / f"served-{seed}.jsonl")]
    reward = rewards(options.out, options.seeds)
    found = {
        "machine": machine(),
        "dtype": find_dtype(),
        "steps": STEPS,
        "seeds": options.seeds,
        "reward": reward,
        **decisions(options.out, options.seeds),
        "settings": {
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "policy_learning_rate": LEARNING_RATE,
            "session_micro_batches": SESSION_STEPS, "tlt": CONFIG.to_dict(),
        },
        "summary": summary(rows, STEPS),
        "served": rows,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found) + "\n")
    print(json.dumps(found["summary"] | {"rose_by": reward["rose_by"]}, indent=1))


if __name__ == "__main__":
    main()
