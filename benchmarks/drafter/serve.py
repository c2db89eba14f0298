"""What a real vLLM engine accepts of the study's drafters, and how fast it decodes with each: RL step by RL step.

    python -m benchmarks.drafter.serve --out study      # after `study`; runs that were served whole are left out

The engine serves the policy of every second kept step (with the toy's empty weights, `demo.toy.widen`: decoding
the small one costs no more than drafting for it) and answers that step's prompts, sampled as in training, under every
arm in turn, in another order each time. An arm is a drafter with a `live_table` of its own, which lives as long as
the run; it is told what a run would tell it, K is its choice, and so is whether the drafter runs at all. `none` is
the engine with its drafter off.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control.engine import Engine, Models
from benchmarks.drafter.study import SERVED_EVERY, STARTS
from benchmarks.drafter.trajectory import MAX_RESPONSE, SAMPLES, file_of, lines_of, policy_of, read_options, texts_of
from benchmarks.lossless.tiny_policy import build_drafter_dir
from demo.machine import find_dtype
from demo.toy import task
from demo.toy.assets import SHIPPED_POLICY, build_assets, demo_width
from demo.toy.widen import HALF_MLP_WIDTH, MLP_WIDTH, widen
from verl_tlt.drafter import provenance

NONE = "none"
REAL_LAYERS = (1, 3, 5)
"""Inputs of the wide policy's layers that are the inputs of the small one's 1, 2, 3."""
ANSWERS = 2
"""Responses to each of a step's prompts: a share of its group, since every arm answers them all."""


@dataclass(frozen=True)
class Arm:
    start: str
    name: str
    """frozen, online, extra; or none, of no start."""
    drafter: Path | None
    """Its directory; None: no drafter."""

    @property
    def control(self) -> str:
        return "off" if self.drafter is None else f"live_table/{self.start}-{self.name}"


def arms(out: Path, seed: int, step: int) -> Iterator[Arm]:
    """All that are compared at one step of one run."""
    yield Arm("", NONE, None)
    for start in STARTS:
        begun = out / "starts" / f"{start}-{seed}"
        yield Arm(start, "frozen", begun)
        yield Arm(start, "online", out / "variants" / f"{start}-{seed}" / f"step-{step:03d}")
        yield Arm(start, "extra", begun.with_name(f"{begun.name}-extra"))


def engine_toy(scratch: Path) -> Models:
    """A policy and a drafter of the shapes that are served, for the engine to begin with."""
    assets = build_assets(scratch, width=demo_width(find_dtype()), train_rows=1, val_rows=1)
    small = json.loads((SHIPPED_POLICY / "config.json").read_text())
    like_small = {"aux_layers": REAL_LAYERS, "intermediate_size": small["intermediate_size"]}
    build_drafter_dir(scratch / "drafter", assets.policy, informed=False, **like_small)
    return Models(assets.policy, scratch / "drafter", [])


def serve(out: Path, seeds: list[int]) -> None:
    """Measure the runs that have not been measured whole; a row of `served-SEED.jsonl` per arm and step."""
    width = HALF_MLP_WIDTH if demo_width(find_dtype()) == "half" else MLP_WIDTH
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(engine_toy(Path(scratch)))
        table = engine.calibrate()
        for seed in seeds:
            if (out / f"served-{seed}.jsonl").exists():
                continue
            for arm in arms(out, seed, 0):
                engine.add_arm(arm.control, table)
            rows: list[dict[str, Any]] = []
            for row in lines_of(file_of(out, seed))[::SERVED_EVERY]:
                wide = Path(scratch) / f"wide-{seed}-{row['step']}"
                widen(policy_of(out, seed, row["step"]), wide, width)
                engine.load_policy(wide)
                prompts = [list(text.tokens[: text.prompt_len]) for text in texts_of(row)[::SAMPLES]]
                found = list(_step(engine, out, seed, row["step"], prompts * ANSWERS))
                rows += found
                told = ", ".join(f"{row['start']} {row['arm']} {row['accept_length']:.2f}" for row in found)
                print(f"seed {seed}, step {row['step']}: {told}", flush=True)
            (out / f"served-{seed}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _step(engine: Engine, out: Path, seed: int, step: int, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    order = list(arms(out, seed, step))
    random.Random(f"{seed} {step}").shuffle(order)
    for arm in order:
        if arm.drafter is not None:
            engine.publish(arm.drafter / "model.safetensors")
        engine.use(arm.control)
        drafting = arm.drafter is not None and engine.sync(arm.control, provenance(arm.drafter)["acceptance"])
        done = engine.decode([(prompt, MAX_RESPONSE) for prompt in prompts], stop=[task.TOKEN_ID[task.EOS]])
        stats = engine.stats(arm.control)
        yield {
            "seed": seed,
            "step": step,
            "start": arm.start,
            "arm": arm.name,
            "drafting": drafting,
            "seconds": done.seconds,
            "tokens": sum(done.lengths),
            "passes": stats["num_passes"],
            "decoded": stats["num_decode_tokens"],
            "accept_length": round(stats["num_decode_tokens"] / max(stats["num_passes"], 1), 4),
            "steps_by_draft_length": stats["steps_by_draft_length"],
        }


def main() -> None:
    options = read_options(__doc__)
    serve(options.out, options.seeds)


if __name__ == "__main__":
    main()
