"""What a real vLLM engine accepts of the study's drafters, and how fast it decodes with each: RL step by RL step.

    python -m benchmarks.drafter.serve --out study      # after `study`; interrupt and repeat at will

The engine serves the policy of every second kept step (with the toy's empty weights, `demo.toy.widen`: decoding
the small one costs no more than drafting for it) and answers that step's prompts, sampled as in training, under every
arm in turn, in another order each time. An arm is a drafter with a `goodput` controller of its own, which lives as long
as the run; it is told what a run would tell it, K is its choice, and so is whether the drafter runs at all. `none` is
the engine with its drafter off.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.control.engine import EngineProcess, Models
from benchmarks.drafter.study import STARTS, read_acceptance
from benchmarks.drafter.trajectory import KEEP_POLICY, MAX_RESPONSE, SAMPLES, load_step
from demo.machine import find_dtype
from demo.toy import task
from demo.toy.assets import SHIPPED_POLICY, build_assets, demo_width
from demo.toy.widen import HALF_MLP_WIDTH, MLP_WIDTH, widen
from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights, save_drafter
from verl_tlt.drafter.policy import policy_shape

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
        return "off" if self.drafter is None else f"goodput/{self.start}-{self.name}"


def arms(out: Path, seed: int, step: int) -> Iterator[Arm]:
    """All that are compared at one step of one run."""
    yield Arm("", NONE, None)
    for start in STARTS:
        begun = out / "starts" / f"{start}-{seed}"
        yield Arm(start, "frozen", begun)
        yield Arm(start, "online", out / "variants" / f"{start}-{seed}" / f"step-{step:03d}")
        yield Arm(start, "extra", begun.with_name(f"{begun.name}-extra"))


def prompts_of(out: Path, seed: int, step: int) -> list[list[int]]:
    """Token ids of a step's prompts, each as often as it is answered."""
    sequences, _, _ = load_step(out / f"seed-{seed}" / f"step-{step:03d}.npz")
    return [s.tokens[: s.prompt_len].tolist() for s in sequences[::SAMPLES] for _ in range(ANSWERS)]


def engine_toy(scratch: Path) -> Models:
    """A policy and a drafter of the shapes that are served, for the engine to begin with."""
    assets = build_assets(scratch, width=demo_width(find_dtype()), train_rows=1, val_rows=1)
    small = json.loads((SHIPPED_POLICY / "config.json").read_text())
    shape = replace(policy_shape(assets.policy), intermediate_size=small["intermediate_size"])
    drafter = build_drafter(shape, aux_layers=REAL_LAYERS, seed=0)
    refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(assets.policy))
    save_drafter(drafter, scratch / "drafter", {})
    return Models(assets.policy, scratch / "drafter", [])


def serve(out: Path, seeds: list[int], every: int) -> None:
    """Measure the runs that have not been measured whole; a row of `served-SEED.jsonl` per arm and step."""
    width = HALF_MLP_WIDTH if demo_width(find_dtype()) == "half" else MLP_WIDTH
    with tempfile.TemporaryDirectory() as scratch:
        engine = EngineProcess(engine_toy(Path(scratch)))
        try:
            table = engine.call("calibrate")
            for seed in seeds:
                if (out / f"served-{seed}.jsonl").exists():
                    continue
                for arm in arms(out, seed, 0):
                    engine.call("add_arm", name=arm.control, table=table)
                rows: list[dict[str, Any]] = []
                for step in recorded_steps(out, seed, every):
                    wide = Path(scratch) / f"wide-{seed}-{step}"
                    widen(out / f"seed-{seed}" / f"policy-{step:03d}", wide, width)
                    engine.call("load_policy", directory=str(wide))
                    found = list(_step(engine, out, seed, step))
                    rows += found
                    told = ", ".join(f"{row['start']} {row['arm']} {row['accept_length']:.2f}" for row in found)
                    print(f"seed {seed}, step {step}: {told}", flush=True)
                (out / f"served-{seed}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        finally:
            engine.close()


def recorded_steps(out: Path, seed: int, every: int) -> list[int]:
    """Steps of a run whose policy and prompts are both kept."""
    run = out / f"seed-{seed}"
    kept = sorted(int(policy.name.removeprefix("policy-")) for policy in run.glob("policy-*"))
    return [step for step in kept if step % every == 0 and (run / f"step-{step:03d}.npz").exists()]


def _step(engine: EngineProcess, out: Path, seed: int, step: int) -> Iterator[dict[str, Any]]:
    prompts, order = prompts_of(out, seed, step), list(arms(out, seed, step))
    random.Random(f"{seed} {step}").shuffle(order)
    for arm in order:
        if arm.drafter is not None:
            engine.call("publish", drafter=str(arm.drafter / "model.safetensors"))
        engine.call("use", name=arm.control)
        drafting = False
        if arm.drafter is not None:
            told = read_acceptance(arm.drafter)
            drafting = engine.call("sync", name=arm.control, acceptance=told)
        spent = engine.call("decode", work=[(p, MAX_RESPONSE) for p in prompts], stop=[task.TOKEN_ID[task.EOS]])
        stats = engine.call("stats", name=arm.control)
        yield {
            "seed": seed,
            "step": step,
            "start": arm.start,
            "arm": arm.name,
            "drafting": drafting,
            **spent,
            "passes": stats["num_passes"],
            "decoded": stats["num_decode_tokens"],
            "accept_length": round(stats["num_decode_tokens"] / max(stats["num_passes"], 1), 4),
            "steps_by_draft_length": stats["steps_by_draft_length"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--every", type=int, default=2 * KEEP_POLICY, help="RL steps between two that are served")
    options = parser.parse_args()
    serve(options.out, options.seeds, options.every)


if __name__ == "__main__":
    main()
