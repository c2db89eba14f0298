"""What the GPU benchmark decodes with its toy: the wide policy, and a drafter trained for it offline.

    python -m benchmarks.gpu.toy DIR [--steps N]

The policy is large enough to be memory-bound on one thread: 30M parameters. It computes what the small
policy does, padded with zeros (`demo.toy.widen`), so the drafter is trained on the small one's hidden states, which
are the same, and its MLP has the small one's width: 1.4M parameters, 5 % of the policy, as EAGLE heads of large models
have. It learns from the task's demonstrations, which the policy imitates, with `verl_tlt.drafter` alone: no engine, no
RL. Both stay in DIR for the next call; the drafter's acceptance on held-out text is printed and kept beside it.
"""

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.control.engine import Models
from demo.toy import task
from demo.toy.assets import SHIPPED_POLICY, build_assets
from verl_tlt.drafter import (
    DrafterTrainer,
    TrainingSequence,
    VerifierWeights,
    acceptance,
    batches,
    build_drafter,
    refresh_verifier_weights,
    save_drafter,
)
from verl_tlt.drafter.policy import policy_shape

LONGEST_DRAFT = 7
STEPS = 300
"""Optimizer steps of the drafter; about half a second each on one core."""
WINDOW = 512
"""Tokens kept of each demonstration, wherever in it."""
BATCH_TOKENS = 512
TTT_STEPS = 3
_HELD_OUT = 24
"""Demonstrations the drafter is scored on."""
ACCEPTANCE = "acceptance.json"


def prepare(directory: Path, steps: int = STEPS) -> Models:
    """Make policy and drafter below `directory`, or find them there."""
    assets = build_assets(directory, width="wide", train_rows=1, val_rows=1)
    home = directory / f"drafter-{steps}"
    if not (home / ACCEPTANCE).exists():
        _train(assets.policy, home, assets.aux_layers, steps)
    return Models(assets.policy, home, json.loads((home / ACCEPTANCE).read_text()))


def demonstration(rng: random.Random) -> tuple[list[int], int]:
    """Token ids of a prompt with its response, which goes on to the longest there is, and the prompt's length."""
    problem = task.sample_problem(rng)
    prompt = task.prompt_tokens(problem)
    words = prompt + task.sample_response(problem, rng, rounds=40)
    return [task.TOKEN_ID[w] for w in words], len(prompt)


def observed(policy: Qwen3ForCausalLM, rng: random.Random) -> TrainingSequence:
    """A window of a demonstration: every second from its beginning, where every response has one."""
    tokens, prompt_len = demonstration(rng)
    begin = rng.choice((0, rng.randrange(max(len(tokens) - WINDOW, 1))))
    return observe(policy, tokens[: begin + WINDOW], prompt_len).window(begin, begin + WINDOW)


def _train(policy_dir: Path, home: Path, aux_layers: tuple[int, ...], steps: int) -> None:
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32).eval().requires_grad_(False)
    shape = replace(policy_shape(policy_dir), intermediate_size=policy.config.intermediate_size)
    drafter = build_drafter(shape, aux_layers=aux_layers, seed=0)
    refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(policy_dir))
    trainer = DrafterTrainer(drafter, learning_rate=2e-3, warmup_steps=20, ttt_steps=TTT_STEPS)
    rng = random.Random(0)
    stream = (observed(policy, rng) for _ in iter(int, 1))
    for batch in batches(stream, BATCH_TOKENS):
        if trainer.steps >= steps:
            break
        trainer.learning_rate = 2e-3 * min(1.0, 2.0 * (1.0 - trainer.steps / steps) + 0.05)
        result = trainer.step(batch)
        if trainer.steps % 10 == 0:
            print(f"step {trainer.steps}: loss {result.loss:.3f}, {result.acc_by_position}", flush=True)
    unseen = random.Random(10**6)
    held_out = [observed(policy, unseen) for _ in range(_HELD_OUT)]
    scores = acceptance(drafter, held_out, temperature=1.0, max_draft=LONGEST_DRAFT)
    accepted, drafts = np.sum([s.accepted for s in scores], axis=0), sum(s.drafts for s in scores)  # [K]
    conditional = accepted / np.concatenate([[drafts], accepted[:-1]])
    save_drafter(drafter, home, {"made for": "benchmarks", "steps": steps})
    (home / ACCEPTANCE).write_text(json.dumps([round(float(p), 4) for p in conditional]))


@torch.no_grad()
def observe(policy: Qwen3ForCausalLM, tokens: list[int], prompt_len: int) -> TrainingSequence:
    """One text as the policy sees it: the outputs of its last three layers, the last of them before the final norm.

    Those are the inputs of layers 3, 5 and 7 of the wide policy, each behind an empty layer.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen["last"] = args[0]

    hook = policy.model.norm.register_forward_pre_hook(keep)
    out = policy.model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    *_, before, middle, _ = out.hidden_states  # the last is normed
    aux = torch.cat([before[0], middle[0], seen["last"][0]], dim=-1)  # [L, 3H]
    return TrainingSequence(torch.tensor(tokens), prompt_len, aux, seen["last"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    options = parser.parse_args()
    toy = prepare(options.directory, options.steps)
    print(f"acceptance by position {toy.acceptance}, drafter in {toy.drafter}")


if __name__ == "__main__":
    main()
