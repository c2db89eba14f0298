"""Supervised training on Collatz chains with solutions, as before most RL.

Without fine-tuning a model of 135M parameters does not follow a chain, and a drafter cannot learn what it writes
instead.
"""

import random
import time
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.real_policy.collatz import Side, chat, draw
from verl_cpu.dtype import find_dtype

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its solution."""

LONG, SHORT = 2, 8
"""Chains in each optimizer step."""
RATE, WARM_UP = 6e-4, 5
"""The learning rate rises over the first steps and falls over the last half."""
SEED, KEPT = 7, 5
IGNORED = -100
"""Label of a token that is not learned."""


def finetune(policy: Path, progress: Path, steps: int) -> None:
    """Train the policy in its directory on both sides' chains, in float32, and write it back in bfloat16.

    The file `progress` keeps the state every `KEPT` steps: a call that was killed goes on from there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)  # a fifth of the weights
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)
    rng, began, first = random.Random(SEED), time.monotonic(), 0
    if progress.exists():
        kept = torch.load(progress, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = int(kept["step"])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, 2 * (steps - step) / steps)
        long = [_example(rng, tokenizer, many=True) for _ in range(LONG)]
        short = [_example(rng, tokenizer, many=False) for _ in range(SHORT)]
        if step < first:
            continue
        learned = sum(len(solved) for _, solved in long + short)
        total = 0.0
        for part in (long, short):  # of like lengths
            loss = _loss(model, part)
            torch.autograd.backward(loss / learned)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.monotonic() - began
        print(f"step {step + 1} of {steps}, {seconds:.0f} s: loss {total / learned:.3f} a token", flush=True)
        if (step + 1) % KEPT == 0:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, partial := progress.with_suffix(".partial"))
            partial.replace(progress)
    model.to(torch.bfloat16).save_pretrained(policy)
    progress.unlink(missing_ok=True)


def _example(rng: random.Random, tokenizer: Any, many: bool) -> Example:
    asked, solved, _ = draw(rng, many, rng.choice(get_args(Side)))
    prompt = tokenizer.apply_chat_template(chat(asked), tokenize=True, add_generation_prompt=True, return_dict=False)
    return list(prompt), [*tokenizer.encode(solved, add_special_tokens=False), tokenizer.eos_token_id]


def _loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """The solutions' cross entropy, a sum over their tokens."""
    ids = [torch.tensor(prompt + solved) for prompt, solved in examples]
    labels = [torch.tensor([IGNORED] * len(prompt) + solved) for prompt, solved in examples]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [examples, T]; causal: no padding is seen
    goal = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=find_dtype() == "bfloat16"):
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[goal != IGNORED])
    return torch.nn.functional.cross_entropy(logits.float(), goal[goal != IGNORED], reduction="sum")
