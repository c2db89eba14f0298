"""What each training objective brings and costs, on the toy: accept length on held-out prompts against training cost.

    python -m benchmarks.drafter.objectives --out benchmarks/results/drafter_objectives.json [--work DIR]

One set of responses of the small toy policy, sampled by stock vLLM; from it one drafter per objective and seed, alike
in everything but the number of draft positions unrolled. Cost is CPU time per training step, measured in turn on the
same batches, so that a busy machine slows all alike. `at_equal_cost` is the accept length after as much training time
as the cheapest objective takes for all its steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.stored import store
from demo.toy.assets import build_assets
from verl_tlt.config import OBJECTIVES
from verl_tlt.drafter import (
    DrafterTrainer,
    Library,
    PolicyStates,
    Text,
    VerifierWeights,
    acceptance,
    build_drafter,
    load_policy,
    pack,
    plan_epoch,
    refresh_verifier_weights,
)
from verl_tlt.warmup.engine import GenerationJob, as_texts, generate
from verl_tlt.warmup.options import SamplingOptions, TrainingOptions
from verl_tlt.warmup.prompts import load_tokenizer, read_prompts
from verl_tlt.warmup.train import TrainingRun

COMMAND = "python -m benchmarks.drafter.objectives"
PROMPTS, RESPONSE, BATCH, DRAFT = 192, 384, 1024, 7
TIMED_STEPS = 7


def recorded(work: Path) -> tuple[Any, list[Text], list[int], list[int]]:
    """Toy assets, the policy's answers to their prompts, and which are trained on and held out."""
    assets = build_assets(work / "assets", width="small")
    prompts = read_prompts([assets.train], load_tokenizer(assets.policy), 256, PROMPTS)
    tokens = [list(p) for p in prompts.tokens]
    job = GenerationJob(str(assets.policy), tokens, SamplingOptions(response_length=RESPONSE), "cpu")
    responses, _ = generate(job, work / "responses")
    texts = as_texts(prompts.tokens, responses)
    held = [i for i, r in enumerate(responses) if r.prompt in prompts.held_out]
    return assets, texts, [i for i in range(len(texts)) if i not in held], held


def new_trainer(assets: Any, objective: str, seed: int) -> DrafterTrainer:
    """A fresh drafter of the toy, as the demo trains it."""
    model = build_drafter(assets.policy, aux_layers=assets.aux_layers, seed=seed)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(assets.policy))
    made = DrafterTrainer(model, learning_rate=2e-3, ttt_steps=OBJECTIVES[objective])
    made.passes = made.ttt_steps  # from the first step on
    return made


def step_seconds(assets: Any, library: Library, train: list[int]) -> dict[str, float]:
    """Median CPU seconds of a training step by objective, taken in turn on the same batches."""
    trainers = {name: new_trainer(assets, name, 0) for name in OBJECTIVES}
    lengths = [len(library.texts[n].tokens) for n in train]
    taken: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for spans in plan_epoch(lengths, BATCH, (0, 0))[:TIMED_STEPS]:
        texts = library.get([train[s.number] for s in spans])
        batch = pack([text.window(s.begin, s.end) for text, s in zip(texts, spans, strict=True)])
        for name, trainer in trainers.items():
            start = time.process_time()
            trainer.step(batch)
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(seconds[2:]) for name, seconds in taken.items()}  # the first steps warm up


def train_one(
    assets: Any,
    library: Library,
    train: list[int],
    held: list[int],
    objective: str,
    seed: int,
    epochs: float,
    work: Path,
) -> dict[str, Any]:
    """Train to the end of `epochs`; the held-out accept length along the way, and by position at the end."""
    trainer = new_trainer(assets, objective, seed)
    options = TrainingOptions(
        model=assets.policy, epochs=epochs, batch_tokens=BATCH, draft_length=DRAFT, seed=seed, device="cpu"
    )
    run = TrainingRun(trainer, library, train, held, options, state_file=work / f"{objective}-{seed}.safetensors")
    run.resume()
    run()
    scores = acceptance(trainer.model, library.get(run.judged), max_draft=DRAFT, budget=BATCH)
    drafts = sum(s.drafts for s in scores)
    accepted = [sum(float(s.accepted[k]) for s in scores) / drafts for k in range(DRAFT)]
    return {
        "seed": seed,
        "steps": trainer.steps,
        "checks": run.progress.checks,
        "accept_length": {str(k): round(1 + sum(accepted[:k]), 4) for k in (1, 3, 5, 7)},
        "survival_by_position": [round(a, 4) for a in accepted],
    }


def tau_after(checks: list[dict[str, float]], steps: float) -> float:
    """Accept length after so many steps, on the line between two checks."""
    before = max((c for c in checks if c["step"] <= steps), key=lambda c: c["step"])
    after = min((c for c in checks if c["step"] >= steps), key=lambda c: c["step"], default=before)
    if after["step"] == before["step"]:
        return before["tau"]
    share = (steps - before["step"]) / (after["step"] - before["step"])
    return before["tau"] + share * (after["tau"] - before["tau"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="keeps assets, responses and state: a second call goes on from them")
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    work = args.work or Path(tempfile.mkdtemp())
    assets, texts, train, held = recorded(work)
    library = Library(PolicyStates(load_policy(assets.policy, "cpu"), assets.aux_layers), texts, max_bytes=4 << 30)
    seconds = step_seconds(assets, library, train)
    print("CPU seconds per step:", seconds, flush=True)
    found: dict[str, Any] = {}
    for seed in args.seeds:
        for objective, passes in OBJECTIVES.items():
            entry = found.setdefault(
                objective, {"passes": passes, "cpu_seconds_per_step": round(seconds[objective], 4), "seeds": []}
            )
            entry["seeds"].append(train_one(assets, library, train, held, objective, seed, args.epochs, work))
            print(objective, seed, entry["seeds"][-1]["accept_length"], flush=True)
            cheapest = min(seconds, key=lambda name: seconds[name])
            budget = max(s["steps"] for s in found[cheapest]["seeds"]) * seconds[cheapest]
            for e in found.values():
                e["relative_cost"] = round(e["cpu_seconds_per_step"] / seconds[cheapest], 2)
                e["at_equal_cost"] = [
                    round(tau_after(s["checks"], budget / e["cpu_seconds_per_step"]), 4) for s in e["seeds"]
                ]
            write(args, texts, found)


def write(args: argparse.Namespace, texts: list[Text], found: dict[str, Any]) -> None:
    """The result so far, whole."""
    facts = {
        "command": f"{COMMAND} --epochs {args.epochs} --seeds {' '.join(map(str, args.seeds))}",
        "policy": "toy, small (3.4M parameters)",
        "responses": len(texts),
        "response_tokens": sum(len(t.tokens) - t.prompt_len for t in texts),
        "draft_length": DRAFT,
        "objectives": found,
    }
    store(args.out, facts)


if __name__ == "__main__":
    main()
