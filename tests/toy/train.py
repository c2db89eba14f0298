"""Makes the toy's policy: a 3.4M-parameter Qwen3 trained on demonstrations, on one CPU core, in minutes.

`python -m tests.toy.train` regenerates the policy that the package ships. A seed fixes the weights, the data and
the order; two runs on the same kind of machine give the same file. Training stops while the policy still errs, so that
reinforcement learning has something to learn.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.toy import task
from tests.toy.tokenizer import save_tokenizer
from verl_cpu.dtype import Dtype, find_dtype, say_dtype

POLICY_DIR = Path(__file__).parent / "policy"
"""Where the package keeps the trained policy."""

IGNORE = -100  # target of positions without loss: prompt and padding


@dataclass(frozen=True)
class TrainConfig:
    """How the policy is trained."""

    steps: int = 1150
    """Optimizer steps."""
    batch_tokens: int = 1536
    """Padded tokens per step."""
    learning_rate: float = 1.5e-3
    """Peak of AdamW's learning rate: reached after 100 steps, held to 60 % of the run, then linear to a twentieth."""
    whole: float = 0.2
    """Share of demonstrations kept to their end. The rest is cut short, which leaves every next token as likely as it
    was; cutting the number of checks instead would teach short responses."""
    continued: float = 0.15
    """Share of demonstrations that go on after `<eos>` (see `task.sample_response`)."""
    seed: int = 0
    """Seeds weights and data."""
    slip: float = task.SLIP
    """Share of wrong digits in demonstrations (see `task.sample_response`)."""


# (share of the run done, most digits, response tokens kept of most demonstrations): the sums are in the first tokens.
_CURRICULUM = ((0.0, 3, 48), (0.08, 6, 96), (0.20, 12, 160))


def policy_config() -> Qwen3Config:
    """A small Qwen3: 4 layers of width 256, its own output head, 2048 positions."""
    return Qwen3Config(
        vocab_size=len(task.TOKENS),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=task.TOKEN_ID[task.BOS],
        eos_token_id=task.TOKEN_ID[task.EOS],
        pad_token_id=task.TOKEN_ID[task.PAD],
    )


def train(config: TrainConfig, products: Dtype) -> Qwen3ForCausalLM:
    """Train a policy with plain next-token loss on the responses: fp32 weights, `products` in either dtype."""
    torch.manual_seed(config.seed)
    model = Qwen3ForCausalLM(policy_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(config)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("toy policy", total=config.steps)
        for step in range(config.steps):
            tokens, targets = next(batches)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * _schedule(step, config.steps)
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=products == "bfloat16"
            ):  # weights and their updates stay fp32
                logits = model(tokens).logits  # [B, T, V]
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(bar, advance=1, description=f"toy policy: loss {loss.item():.3f}")
    return model


def save_policy(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write `model` in bf16 with its tokenizer: a directory that verl, vLLM and transformers load."""
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)


def _schedule(step: int, steps: int) -> float:
    """The learning rate's share of its peak at `step`."""
    done = step / steps
    return min(1.0, (step + 1) / 100) * (1.0 if done < 0.6 else max(0.05, (1 - done) / 0.4))


def _batches(config: TrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), both int64 [B, T]: sequences of like length, padded on the right."""
    rng = random.Random(config.seed)
    step = 0
    while True:
        _, digits, keep = [stage for stage in _CURRICULUM if step / config.steps >= stage[0]][-1]
        pool = sorted((_example(rng, config, digits, keep) for _ in range(256)), key=lambda e: len(e[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for example in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(example[0]) > config.batch_tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group)
            step += 1


def _example(rng: random.Random, config: TrainConfig, digits: int, keep: int) -> tuple[list[int], int]:
    """Token ids of prompt and demonstration, and the prompt's length."""
    problem = task.sample_problem(rng, digits)
    rounds = 1
    while rng.random() < (config.continued if rounds == 1 else 0.6):
        rounds += 1
    prompt = task.prompt_tokens(problem)
    response = task.sample_response(problem, rng, config.slip, rounds)
    if rng.random() >= config.whole:
        response = response[:keep]
    return [task.TOKEN_ID[w] for w in prompt + response], len(prompt)


def _pad(group: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in group)
    tokens = torch.full((len(group), width), task.TOKEN_ID[task.PAD])  # [B, T]
    targets = torch.full((len(group), width), IGNORE)  # [B, T]
    for row, (ids, prompt) in enumerate(group):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
    return tokens, targets


def main() -> None:
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(prog="python -m tests.toy.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=POLICY_DIR, help="directory for the policy (default: the package)")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = find_dtype()
    print(say_dtype(dtype))
    save_policy(train(TrainConfig(steps=args.steps, seed=args.seed), dtype), args.out)
    print(f"policy written to {args.out}")


if __name__ == "__main__":
    main()
