"""Records the policy of a GRPO run and what it wrote, step by step, so that many drafters can be tried on the same run.

    python -m benchmarks.drafter.trajectory --out study [--seeds 0 1 2 3 4]

Speculative decoding is lossless: which drafter is served changes how fast a rollout is and not what is in it. So the
arms of the study share one trajectory per seed, and it is made only once. It is a plain GRPO loop in one process: the
policy's current weights write the responses, the toy's own reward judges them, one
on-policy update follows (group-normalised advantages, token-mean loss, no KL term). Called again, the command leaves
out the runs that are whole.
"""

import argparse
import copy
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from demo.machine import find_dtype, say_dtype
from demo.toy import task
from demo.toy.assets import SHIPPED_POLICY, ensure
from demo.toy.reward import compute_score
from demo.toy.train import TrainConfig, save_policy, train
from verl_tlt.drafter import Text
from verl_tlt.drafter.data import grouped

STEPS, PROMPTS, SAMPLES = 65, 8, 8
"""Of a run; groups a step and responses in each are few, because two cores carry the study."""
SEEDS = (0, 1, 2, 3, 4)
MAX_RESPONSE, MAX_DIGITS = 384, 8
END, PAD = task.TOKEN_ID[task.EOS], task.TOKEN_ID[task.PAD]
LEARNING_RATE = 1e-4
UNTIDY = TrainConfig(steps=200, learning_rate=5e-4, seed=1, slip=0.2)
"""What makes a start policy of the toy's: demonstrations that get every fifth digit wrong. RL has it to unlearn."""
MICRO_BATCH = 1536
"""Padded tokens a forward."""
DTYPE = find_dtype()
"""Of the update's products: whichever is the faster one here."""


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], samples: int, seed: int) -> list[Text]:
    """`samples` responses to each prompt at temperature 1, by group; weights are rounded to 16 bits, as in engines."""
    texts = [p for p in prompts for _ in range(samples)]
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in texts])  # [B, T], padded on the left
    rounded = copy.deepcopy(model).bfloat16().float()
    torch.manual_seed(seed)
    found = rounded.generate(
        ids, attention_mask=ids != PAD, do_sample=True, top_k=0, max_new_tokens=MAX_RESPONSE, eos_token_id=END,
        pad_token_id=PAD,
    )[:, width:].tolist()  # fmt: skip
    responses = (row[: row.index(END) + 1] if END in row else row for row in found)
    return [Text((*prompt, *response), len(prompt)) for prompt, response in zip(texts, responses, strict=True)]


def start_policy(out: Path) -> Path:
    """The policy that all runs begin with; made only once."""
    out.mkdir(parents=True, exist_ok=True)
    ensure(out / "policy", str(UNTIDY), lambda target: save_policy(train(UNTIDY, DTYPE, SHIPPED_POLICY), target))
    return out / "policy"


def load_model(policy: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def update(model: Any, optimizer: torch.optim.Optimizer, texts: list[Text], rewards: np.ndarray) -> None:
    """One GRPO update on groups of `SAMPLES` texts."""
    groups = rewards.reshape(-1, SAMPLES)
    spread = groups.std(axis=1, keepdims=True)
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)).ravel()  # [N]
    total = sum(len(text.tokens) - text.prompt_len for text in texts)
    taught = [i for i in range(len(texts)) if advantages[i]]  # a group of equal rewards teaches nothing
    taught.sort(key=lambda i: len(texts[i].tokens))
    for rows in grouped(taught, lambda i: len(texts[i].tokens), MICRO_BATCH, padded=True):
        ids = pad_sequence([torch.tensor(texts[i].tokens) for i in rows], batch_first=True, padding_value=PAD)  # [B, T]
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE == "bfloat16"):  # weights float32, as in verl
            logits = model(ids).logits.float()
        logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]  # [B, T-1]
        loss = logp.new_zeros(())
        for row, i in enumerate(rows):
            response = slice(texts[i].prompt_len - 1, len(texts[i].tokens) - 1)
            loss = loss - float(advantages[i]) * logp[row, response].sum() / total
        torch.autograd.backward(loss)
    if taught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def prompts_of(problems: Sequence[task.Problem]) -> list[list[int]]:
    return [[task.TOKEN_ID[t] for t in task.prompt_tokens(problem)] for problem in problems]


def judge(problem: task.Problem, text: Text) -> float:
    words = [task.TOKENS[i] for i in text.tokens[text.prompt_len :]]
    return compute_score("toy_addition", " ".join(words), " ".join(task.answer_tokens(problem)))


def record(out: Path, seed: int) -> None:
    """One run; `run.jsonl` comes last."""
    shutil.rmtree(out / f"seed-{seed}", ignore_errors=True)
    model = load_model(start_policy(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    rows = []
    for step in range(STEPS):
        save_policy(copy.deepcopy(model), policy_of(out, seed, step))
        rng = random.Random(f"{seed} {step}")
        problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(PROMPTS)]
        texts = sample(model, prompts_of(problems), SAMPLES, rng.randrange(2**31))
        rewards = np.array([judge(problems[i // SAMPLES], text) for i, text in enumerate(texts)])
        update(model, optimizer, texts, rewards)
        said = {"seed": seed, "step": step, "reward": float(rewards.mean())}
        print(said, flush=True)
        rows.append({**said, "texts": [[text.tokens, text.prompt_len] for text in texts]})
    file_of(out, seed).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def file_of(out: Path, seed: int) -> Path:
    """Rewards and texts of a whole run, a row a step."""
    return out / f"seed-{seed}" / "run.jsonl"


def policy_of(out: Path, seed: int, step: int) -> Path:
    """Directory of the policy that wrote the step's responses."""
    return out / f"seed-{seed}" / f"policy-{step:03d}"


def texts_of(row: dict[str, Any]) -> list[Text]:
    return [Text(tuple(tokens), prompt_len) for tokens, prompt_len in row["texts"]]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Rows of a file with one JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_options(about: str, **more: Any) -> argparse.Namespace:
    """What all commands of the study take; `more` is an option of this one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    for name, given in more.items():
        parser.add_argument(f"--{name}", **given)
    return parser.parse_args()


def main() -> None:
    options = read_options(__doc__)
    torch.set_num_threads(1)
    print(say_dtype(DTYPE))
    for seed in options.seeds:
        if not file_of(options.out, seed).exists():
            record(options.out, seed)


if __name__ == "__main__":
    main()
