"""Is a drafter that is trained along better for its policy than one that stays as it was? GRPO of a language model.

    python -m benchmarks.e2e.along --out benchmarks/results/along.json [--steps 17] [--seed 1]

The run starts with a head of `verl-tlt warmup` that has seen little text, and trains it in idle time with the spot
trainer's defaults. Then stock vLLM serves the policy before the run and the policy after it, each with the head of the
start and with the head that was trained along. The prompts are of the warm-up's side. They share no step of a chain
with those of the run, but with those of the warm-up, which favours the head of the start. The policy has had less
fine-tuning than that of the other benchmarks, so that it still learns. K is the same in every step, since a chosen one
would change the accept length too. The result also has accept length and reward by step. The work folder keeps what was
measured: a command that was killed goes on.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.e2e.__main__ import ROOT, STALL_S, recipe_of
from benchmarks.e2e.arms import LOADS
from benchmarks.e2e.head import evaluated
from benchmarks.real_policy.head import DRAFT_VOCAB, head_facts, train
from benchmarks.real_policy.job import real_assets
from benchmarks.real_policy.policy import fine_tuned, make_policy
from benchmarks.stored import store
from tests.toy.assets import Assets
from verl_cpu.dtype import find_dtype, say_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.checks.recipe import ROLLOUT, quoted
from verl_tlt.commands.compare.command import take_turns
from verl_tlt.commands.compare.plan import TLT, Arm, make_plan
from verl_tlt.commands.compare.record import STEP, Record
from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.drafter import provenance
from verl_tlt.errors import TLTError

PLACE = ROOT / ".cache" / "along"
"""Keeps the policy and its head."""
HEAD = PLACE / "drafter"
FINE_TUNING, K, LONGEST = 60, 5, 500
"""Steps of fine-tuning, the draft length, and the most tokens of a response."""
PROMPTS, EPOCHS = 245, 1
"""Of the warm-up."""
ARM = Arm(TLT, "trained in idle time", True)
BEFORE, AFTER = "before the run", "after the run"
JUDGED = 64
"""Prompts that are served."""


def make_start() -> Assets:
    """The policy and the prompts that the run starts with, and its head, made unless they are there."""
    make_policy(PLACE, FINE_TUNING)
    if not head_facts(PLACE):
        train(PLACE, PROMPTS, ("--epochs", str(EPOCHS)))
    return real_assets(PLACE)


def overrides(seed: int) -> tuple[str, ...]:
    """Of the recipe; `seed`: of the order of the run's prompts."""
    data = ("data.shuffle=True", f"data.seed={seed}", f"data.max_response_length={LONGEST}")
    drafts = ("tlt.speculation.policy=fixed", f"tlt.speculation.fixed={K}", f"tlt.speculation.max_draft_length={K}")
    drafter = (f"tlt.drafter.vocab={DRAFT_VOCAB}", f"tlt.drafter.path={quoted(HEAD)}")
    training = ("tlt.drafter.learning_rate=1e-3", "tlt.spot.max_epochs=3")  # the defaults; the demo's recipe has others
    return (*data, *drafts, *drafter, *training)


def merged(checkpoint: Path, policy: Path) -> Path:
    """The policy of a checkpoint as a directory of Hugging Face, made by verl's own command unless it is there."""
    if not policy.exists():
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        places = ["--local_dir", str(checkpoint / "actor"), "--target_dir", str(draft := policy.with_suffix(".part"))]
        subprocess.run([*command, *places], check=True)
        draft.rename(policy)
    return policy


def served(policy: Path, head: Path, prompts: Path) -> dict[str, float]:
    """What stock vLLM counts with this policy and head, and what the head's text predicts of it."""
    engine = (
        f"actor_rollout_ref.model.path={quoted(policy)}", f"{ROLLOUT}.dtype={find_dtype()}",
        f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.max_num_seqs=32",
        f"++{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
    )  # fmt: skip
    asked: dict[str, Any] = {"limit": JUDGED, "draft_length": K, "response_length": LONGEST}
    found = evaluated(policy, head, prompts, overrides=list(engine), **asked)
    return {
        "accept_length": round(found.served.accept_length, 4),
        "two_errors": round(found.chance * found.served.accept_length, 4),
        "simulated": round(found.simulated.accept_length, 4),
        "tokens": found.tokens,
    }


@interruptible()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=17, help="of GRPO, of which the first does not count")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the run's prompts")
    parser.add_argument("--work", type=Path, default=Path("demo-out/along"), help="folder that keeps the run")
    parser.add_argument("--out", type=Path)
    options, console = parser.parse_args(), make_console()
    os.environ.update(CPU_ENGINE | {"OMP_NUM_THREADS": str(os.cpu_count())})  # of what is served here
    work, assets = options.work.resolve(), make_start()
    say(console, say_dtype(find_dtype()))
    plan = make_plan(recipe_of(work, assets, LOADS["small"], overrides(options.seed)), options.steps, work)
    record = Record(work, plan.asked([ARM]))
    take_turns(plan, [ARM], 1, record, console, STALL_S, lambda: None)
    checkpoint = plan.folder / ARM.name / f"{STEP}{options.steps}"
    policies = {BEFORE: assets.policy, AFTER: merged(checkpoint, work / "policy")}
    heads = {BEFORE: HEAD, AFTER: checkpoint / "tlt_drafter"}
    prompts = real_assets(PLACE, "warm-up").val
    kept = work / "served.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for policy in policies:
        for head in heads:
            if (name := f"policy {policy}, head {head}") not in found:
                found[name] = served(policies[policy], heads[head], prompts)
                kept.write_text(json.dumps(found, indent=1))
            say(console, f"{name}: {json.dumps(found[name])}")
    if options.out:
        shown = ("step", "accept_length", "reward", "tokens")
        steps = [{name: getattr(step, name) for name in shown} for step in record.steps(TLT)]
        trained = provenance(heads[AFTER])["tokens_trained"]
        facts = {
            "dtype": find_dtype(),
            "seed": options.seed,
            "draft_length": K,
            "fine_tuning": fine_tuned(policies[BEFORE]),
        }
        store(options.out, {**facts, "tokens_trained": trained, "served": found, "steps": steps}, {"CLONE": ROOT})


if __name__ == "__main__":
    try:
        main()
    except TLTError as error:
        raise SystemExit(str(error)) from None
