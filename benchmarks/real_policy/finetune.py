"""Teaches a language model what solutions look like: a few minutes of supervised training, as before most RL.

A model of 135M parameters writes no long solution without it: it follows none to its end, and a drafter cannot learn
what it writes instead.
"""

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_policy.problems import chat, draw

STEPS, FEW, RATE, SEED = 50, 6, 3e-4, 7
"""Optimizer steps, each of one long solution and so many short ones. The seed is none that prompts are drawn with."""
RISING, FALLING = 5, 25
"""Steps at the start and at the end in which the learning rate grows and falls."""
IGNORED = -100
"""Label of a token that is not learned."""


def finetune(policy: Path) -> None:
    """Train the policy in its directory on problems with solutions, in float32, and write it back in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)  # a fifth of the weights
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(SEED)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / RISING, (STEPS - step) / FALLING)
        parts = [[_example(rng, tokenizer, many=True)], [_example(rng, tokenizer, many=False) for _ in range(FEW)]]
        learned = sum(len(solved) for part in parts for _, solved in part)
        for part in parts:  # of like lengths
            torch.autograd.backward(_loss(model, part) / learned)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(policy)


def _example(rng: random.Random, tokenizer: Any, many: bool) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its solution."""
    asked, solved, _ = draw(rng, many)
    prompt = tokenizer.apply_chat_template(chat(asked), tokenize=True, add_generation_prompt=True, return_dict=False)
    return list(prompt), [*tokenizer.encode(solved, add_special_tokens=False), tokenizer.eos_token_id]


def _loss(model: Any, examples: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """The solutions' cross entropy, a sum over their tokens."""
    ids = [torch.tensor(prompt + solved) for prompt, solved in examples]
    labels = [torch.tensor([IGNORED] * len(prompt) + solved) for prompt, solved in examples]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [examples, T]; causal: no padding is seen
    goal = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[goal != IGNORED])
    return torch.nn.functional.cross_entropy(logits.float(), goal[goal != IGNORED], reduction="sum")
