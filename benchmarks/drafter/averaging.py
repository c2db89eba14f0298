"""Is the average of a head's recent weights better than the weights? By seed, on a new head and on a warmed-up one.

    python -m benchmarks.drafter.averaging run    --work DIR --corpus toy --seeds 0 1
    python -m benchmarks.drafter.averaging report --work DIR --out benchmarks/results/drafter_averaging.json

`new` is a random head trained at a run's constant learning rate. `warmed up` is one whose learning rate has fallen to a
tenth, as in `verl-tlt warmup`, and which then goes on at the whole rate, as in a run. Both are scored on the way with
their weights and with the average (`DrafterTrainer.averages`), by the gate's own walk at temperature 1. What is there
already is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter.corpora import Corpus, load_corpus
from benchmarks.drafter.learning import DRAFT, drawn, new_trainer, scored
from benchmarks.drafter.recipes import RECIPES
from benchmarks.drafter.study_report import spread
from benchmarks.stored import store
from verl_tlt.drafter import Batch, DrafterTrainer
from verl_tlt.warmup.train import LAST_LR

RECIPE = RECIPES["token, grow to 3"]
"""How a run trains."""
STEPS, AGAIN, CHECKS = 300, 120, 3
"""Optimizer steps of a head from the start on, and of a warmed-up one in the run; times that each is scored."""
CORPORA = ("toy", "prose")


def train(trainer: DrafterTrainer, draw: Callable[[], Batch], steps: int, corpus: Corpus) -> list[dict[str, float]]:
    """So many steps; accept lengths of weights and average on the way."""
    checks, first = [], trainer.steps
    while (taken := trainer.steps - first) < steps:
        if taken and taken % (steps // CHECKS) == 0:
            checks.append(compared(trainer, corpus) | {"steps": taken})
        trainer.step(draw())
    return [*checks, compared(trainer, corpus) | {"steps": steps}]


def compared(trainer: DrafterTrainer, corpus: Corpus) -> dict[str, float]:
    """Accept lengths of the weights and of their average."""
    weights = scored(trainer, corpus)[str(DRAFT)]
    with trainer.holding({name: average.numpy() for name, average in trainer.averages().items()}):
        return {"weights": weights, "average": scored(trainer, corpus)[str(DRAFT)]}


def run(work: Path, name: str, seed: int) -> None:
    """Both heads of a seed, into `work`, unless they are there."""
    file = work / "averaging" / f"{name}-{seed}.json"
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    corpus = load_corpus(name, work)
    found = {"new": train(new_trainer(corpus, RECIPE, seed), drawn(corpus, RECIPE.rows, seed), STEPS, corpus)}
    warm, draw = new_trainer(corpus, RECIPE, seed), drawn(corpus, RECIPE.rows, seed)
    while warm.steps < STEPS:
        warm.learning_rate = RECIPE.learning_rate * (1 - (1 - LAST_LR) * warm.steps / STEPS)
        warm.step(draw())
    started = scored(warm, corpus)[str(DRAFT)]
    again = DrafterTrainer(warm.model, learning_rate=RECIPE.learning_rate, trained=True)
    begun = {"weights": started, "average": started, "steps": 0}
    found["warmed up"] = [begun, *train(again, draw, AGAIN, corpus)]
    file.write_text(json.dumps(found))
    print(name, seed, found, flush=True)


def report(work: Path, out: Path | None) -> None:
    """By corpus and head: accept lengths over the seeds, and how much longer the average's is, with 95 %."""
    corpora: dict[str, Any] = {}
    for name in CORPORA:
        seeds = [json.loads(file.read_text()) for file in sorted((work / "averaging").glob(f"{name}-*.json"))]
        corpora[name] = {head: [pooled(rows) for rows in zip(*(s[head] for s in seeds), strict=True)] for head in
                         ("new", "warmed up")} | {"seeds": len(seeds)}  # fmt: skip
    print(json.dumps(corpora, indent=1))
    if out is not None:
        store(out, {"draft_length": DRAFT, "corpora": corpora})


def pooled(rows: tuple[dict[str, float], ...]) -> dict[str, Any]:
    """One check of every seed."""
    means = {key: round(sum(row[key] for row in rows) / len(rows), 3) for key in ("weights", "average")}
    mean, half = spread([row["average"] / row["weights"] - 1 for row in rows])
    longer = [round(value, 4) for value in (mean, mean - half, mean + half)]
    return {"steps": rows[0]["steps"], **means, "longer": longer}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("run", "report"))
    parser.add_argument("--work", type=Path, required=True, help="keeps corpora and runs")
    parser.add_argument("--corpus", choices=CORPORA)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "report":
        report(options.work, options.out)
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            run(options.work, options.corpus, seed)


if __name__ == "__main__":
    main()
