"""What makes a head learn fast? Accept length on held-out text against CPU time, one change at a time, over seeds.

    python -m benchmarks.drafter.learning costs  --work DIR --corpus toy
    python -m benchmarks.drafter.learning run    --work DIR --corpus toy --recipes base norm_output --seeds 0 1
    python -m benchmarks.drafter.learning report --work DIR --out benchmarks/results/drafter_learning.json

`costs` times a step of every recipe in turn on the same batches, on one thread. `run` trains heads for `SECONDS` by
those costs, so what else the machine does has no part in it, and scores them on the way by the gate's own walk at
temperature 1; it leaves out what is there already. `report` pools the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.drafter.corpora import Corpus, load_corpus
from benchmarks.drafter.recipes import BASE, RECIPES, Muon, Recipe, new_head
from benchmarks.drafter.study_report import spread
from benchmarks.stored import store
from verl_tlt.drafter import Batch, DrafterTrainer, acceptance, pack, train
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.scoring import counts

COMMAND = "python -m benchmarks.drafter.learning"
SECONDS = {"toy": 40.0, "prose": 20.0}
"""CPU time of training, by the steps' costs."""
CHECKS = 6
"""Times that a head is scored, evenly spread over its time."""
DRAFT = 7
LEVELS = (1.5, 2.0, 3.0, 4.0)
"""Accept lengths whose time is told; 1e6 seconds where one was not reached."""
WORK = ("width", "query_norms", "mixed", "rows", "loss", "muon")
"""What a pass's cost depends on."""
TIMED = 5
"""Steps timed of each recipe; the first two do not count."""


def new_trainer(corpus: Corpus, recipe: Recipe, seed: int) -> DrafterTrainer:
    """A fresh head and what trains it."""
    made = DrafterTrainer(
        new_head(corpus, recipe, seed),
        learning_rate=recipe.learning_rate,
        ttt_steps=recipe.grows or recipe.passes,
        loss=recipe.loss,
    )
    made.passes = recipe.passes
    made.optimizer.param_groups[0]["betas"] = recipe.betas
    if recipe.muon:
        made.optimizer.__class__ = Muon
    return made


def drawn(corpus: Corpus, rows: int, seed: int) -> Callable[[], Batch]:
    """Micro-batches as a session draws them."""
    buffer, rng = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0), random.Random(seed)
    for i, sequence in enumerate(corpus.train):
        buffer.add(0, i, sequence)
    buffer.begin_session(max_epochs=1e9)
    return lambda: pack(buffer.sample_batch(rng, rows))


def costs(work: Path, name: str, recipes: list[str]) -> None:
    """CPU seconds of a step by recipe and passes, the median, into `work`."""
    corpus, file = load_corpus(name, work), work / f"costs-{name}.json"
    trainers = {recipe: new_trainer(corpus, RECIPES[recipe], 0) for recipe in recipes}
    sources = {rows: drawn(corpus, rows, 0) for rows in {RECIPES[recipe].rows for recipe in recipes}}
    taken: dict[str, dict[str, list[float]]] = {
        recipe: {str(n): [] for n in RECIPES[recipe].unrolled} for recipe in recipes
    }
    for _ in range(TIMED):
        batches = {rows: draw() for rows, draw in sources.items()}
        for recipe, by_passes in taken.items():
            for passes, seconds in by_passes.items():
                trainers[recipe].passes = int(passes)
                begun = time.process_time()
                trainers[recipe].step(batches[RECIPES[recipe].rows])
                seconds.append(time.process_time() - begun)
    found = json.loads(file.read_text()) if file.exists() else {}
    found |= {
        recipe: {n: round(statistics.median(s[2:]), 4) for n, s in by_passes.items()}
        for recipe, by_passes in taken.items()
    }
    file.write_text(json.dumps(found, indent=1))
    print(file.read_text())


def step_seconds(work: Path, name: str, recipe: Recipe) -> dict[int, float]:
    """By passes; of all recipes with the same work together, for a step costs the same whatever its rate.

    What was not timed with so many passes costs as many times its own three as `base` does.
    """
    measured = json.loads((work / f"costs-{name}.json").read_text())

    def seconds(one: Recipe, passes: int) -> float | None:
        alike = (of for other, of in measured.items() if work_of(RECIPES[other]) == work_of(one))
        taken = [of[str(passes)] for of in alike if str(passes) in of]
        return statistics.median(taken) if taken else None

    def of_base(passes: int) -> float:
        return (seconds(recipe, BASE.passes) or math.nan) * seconds(BASE, passes) / seconds(BASE, BASE.passes)

    return {n: seconds(recipe, n) or of_base(n) for n in recipe.unrolled}


def work_of(recipe: Recipe) -> tuple[object, ...]:
    """What a pass's cost depends on."""
    return tuple(getattr(recipe, key) for key in WORK)


def run(work: Path, name: str, recipe_name: str, seed: int) -> None:
    """Train one head; its accept lengths by time into `work`, unless they are there."""
    file = work / "runs" / f"{name}-{recipe_name.replace(' ', '_')}-{seed}.json"
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    corpus, recipe = load_corpus(name, work), RECIPES[recipe_name]
    cost = step_seconds(work, name, recipe)
    trainer, draw = new_trainer(corpus, recipe, seed), drawn(corpus, recipe.rows, seed)
    spent, rows, checks = 0.0, 0, []
    with mock.patch.object(train, "CLIP", recipe.clip):
        while spent < SECONDS[name]:
            if recipe.decays:
                trainer.learning_rate = recipe.learning_rate * (1 - 0.9 * spent / SECONDS[name])
            batch = draw()
            spent, rows = spent + cost[trainer.passes], rows + batch.rows
            trainer.step(batch)
            if spent >= SECONDS[name] * (len(checks) + 1) / CHECKS:
                checks.append({"seconds": spent, "steps": trainer.steps, "rows": rows, "passes": trainer.passes})
                checks[-1] |= scored(trainer, corpus)
    file.write_text(json.dumps({"corpus": name, "recipe": recipe_name, "seed": seed, "checks": checks}))
    print(name, recipe_name, seed, [check["7"] for check in checks], flush=True)


def scored(trainer: DrafterTrainer, corpus: Corpus) -> dict[str, float]:
    """Accept length at some draft lengths, and acceptance by position."""
    total = counts(acceptance(trainer.model, corpus.held_out, max_draft=DRAFT), DRAFT).sum(axis=0)  # [1 + K]
    survival = total / total[0]
    return {str(k): round(float(survival[: k + 1].sum()), 4) for k in (1, 3, DRAFT)}


def seconds_to(checks: list[dict[str, float]], level: float) -> float:
    """CPU seconds to this accept length, on the line between two checks; infinite where it was not reached."""
    before = {"seconds": 0.0, str(DRAFT): 1.0}
    for check in checks:
        if check[str(DRAFT)] >= level:
            share = (level - before[str(DRAFT)]) / (check[str(DRAFT)] - before[str(DRAFT)])
            return before["seconds"] + share * (check["seconds"] - before["seconds"])
        before = check
    return math.inf


def report(work: Path, out: Path | None) -> None:
    """By corpus and recipe: accept length on the way, and how many times faster than `base` it gets where that ends."""
    runs = [json.loads(file.read_text()) for file in sorted((work / "runs").glob("*.json"))]
    found: dict[str, Any] = {}
    for name in SECONDS:
        of = {(r["recipe"], r["seed"]): r["checks"] for r in runs if r["corpus"] == name}
        if ("base", 0) in of:
            found[name] = {
                recipe: pooled({s: c for (r, s), c in of.items() if r == recipe}, of)
                | {"step_seconds": step_seconds(work, name, RECIPES[recipe])}
                for recipe in RECIPES
                if any(r == recipe for r, _ in of)
            }
    for name, recipes in found.items():
        print(name)
        for recipe, row in sorted(recipes.items(), key=lambda item: -item[1]["accept_length"][-1]):
            print(f"  {recipe:24}", row["seeds"], row["accept_length"], row.get("faster"), row.get("longer"))
    if out is not None:
        store(out, {"command": COMMAND, "seconds": SECONDS, "draft_length": DRAFT, "corpora": found})


def pooled(mine: dict[int, Any], everyone: dict[tuple[str, int], Any]) -> dict[str, Any]:
    """One recipe's seeds together, and paired by seed with `base`."""
    lengths = np.array([[check[str(DRAFT)] for check in checks] for checks in mine.values()])  # [seeds, checks]
    row: dict[str, Any] = {
        "seeds": len(mine),
        "steps": statistics.median(checks[-1]["steps"] for checks in mine.values()),
        "accept_length": lengths.mean(axis=0).round(3).tolist(),
        "seconds_to": {
            str(level): [round(min(seconds_to(checks, level), 1e6), 1) for checks in mine.values()] for level in LEVELS
        },
        "by_seed": {str(seed): checks[-1] for seed, checks in mine.items()},
    }
    both = [seed for seed in mine if ("base", seed) in everyone]
    ends = {seed: everyone["base", seed][-1] for seed in both}
    gains = [mine[seed][-1][str(DRAFT)] / ends[seed][str(DRAFT)] - 1 for seed in both]
    # A seed that does not get there counts as if it did at the end: at most as fast as it was.
    times = [min(seconds_to(mine[s], ends[s][str(DRAFT)]), mine[s][-1]["seconds"]) for s in both]
    faster = [math.log(ends[seed]["seconds"] / t) for seed, t in zip(both, times, strict=True)]
    for key, values, of in (("longer", gains, float), ("faster", faster, math.exp)):
        mean, half = spread(values) if len(both) > 1 else (values[0], None)  # one seed has no interval
        row[key] = [round(of(v), 3) for v in ((mean,) if half is None else (mean, mean - half, mean + half))]
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("costs", "run", "report"))
    parser.add_argument("--work", type=Path, required=True, help="keeps corpora, costs and runs")
    parser.add_argument("--corpus", choices=tuple(SECONDS))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    options.work.mkdir(parents=True, exist_ok=True)
    if options.part == "report":
        report(options.work, options.out)
    elif options.part == "costs":
        costs(options.work, options.corpus, options.recipes)
    else:
        for seed in options.seeds:
            for recipe in options.recipes:
                run(options.work, options.corpus, recipe, seed)


if __name__ == "__main__":
    main()
