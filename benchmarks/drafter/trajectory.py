"""Records what the policy of a GRPO run looked like at every step, so that many drafters can be tried on the same run.

    python -m benchmarks.drafter.trajectory --out study [--seeds 0 1 2 3 4]

Speculative decoding is lossless: which drafter is served changes how fast a rollout is and not what is in it. So the
arms of the study share one trajectory per seed, and it is made only once. It is a plain GRPO loop in one process: the
policy's current weights write the responses, the toy's own reward judges them, one
on-policy update follows (group-normalised advantages, token-mean loss, no KL term). The forward pass of the update
also yields the hidden states that a tap would have kept. Called again, the command leaves out the runs that are whole.
"""

import argparse
import copy
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo.machine import find_dtype, say_dtype
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from demo.toy.reward import compute_score
from demo.toy.train import TrainConfig, save_policy, train
from verl_tlt.drafter import TrainingSequence, VerifierWeights, from_numpy16, to_numpy16
from verl_tlt.drafter.data import grouped
from verl_tlt.messages.training import VerifierArrays

PROMPTS, SAMPLES = 8, 8
"""Groups a step and responses in each: small, because two cores carry the study."""
MAX_RESPONSE, MAX_DIGITS = 384, 8
END, PAD = task.TOKEN_ID[task.EOS], task.TOKEN_ID[task.PAD]
LEARNING_RATE = 1e-4
UNTIDY = TrainConfig(steps=200, learning_rate=5e-4, seed=1, slip=0.2)
"""What makes a start policy of the toy's: demonstrations that get every fifth digit wrong. RL has it to unlearn."""
MICRO_BATCH = 1536
"""Padded tokens a forward."""
DTYPE = find_dtype()
"""Of the update's products: whichever is the faster one here."""
Text = tuple[list[int], int]
"""Token ids of a prompt and its response, and the prompt's length."""
STEPS, KEEP_POLICY = 65, 8
"""Of a run; and steps between policies kept for a real engine."""
SEEDS = (0, 1, 2, 3, 4)


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
    return [(prompt + response, len(prompt)) for prompt, response in zip(texts, responses, strict=True)]


def start_policy(out: Path) -> Path:
    """The policy that all runs begin with; made only once."""
    directory = out / "policy"
    if not directory.exists():
        save_policy(train(UNTIDY, DTYPE, SHIPPED_POLICY), directory.with_suffix(".tmp"))
        os.replace(directory.with_suffix(".tmp"), directory)
    return directory


class Taught:
    """The policy under training, and the hidden states of its last forward passes."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        self._states: dict[int, torch.Tensor] = {}
        layers = self.model.model.layers
        for index in (*AUX_LAYERS["small"], len(layers)):
            module = self.model.model.norm if index == len(layers) else layers[index]
            module.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int) -> Any:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[index] = (args[0] if args else kwargs["hidden_states"]).detach()  # [B, T, H]

        return keep

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for tokens [B, T], padded on the right; weights float32 as in verl."""
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE == "bfloat16"):
            return self.model(tokens).logits.float()

    def captured(self, text: Text, row: int) -> TrainingSequence:
        """What a spot worker gets of a text that was one row of the last forward: states in 16 bits."""
        tokens, prompt_len = text
        *aux, last = (self._states[i][row, : len(tokens)].bfloat16() for i in sorted(self._states))
        return TrainingSequence(torch.tensor(tokens), prompt_len, torch.cat(aux, dim=-1), last.clone())

    def verifier_weights(self) -> VerifierArrays:
        """Embedding, head and final norm in 16 bits."""
        state = self.model.state_dict()
        parts = VerifierWeights(state["model.embed_tokens.weight"], state["lm_head.weight"], state["model.norm.weight"])
        return VerifierArrays(**{f.name: to_numpy16(getattr(parts, f.name)) for f in dataclasses.fields(parts)})


def micro_batches(texts: list[Text], rows: list[int]) -> list[list[int]]:
    """`rows` in groups alike in length, each at most `MICRO_BATCH` padded tokens."""
    ordered = sorted(rows, key=lambda i: len(texts[i][0]))
    return list(grouped(ordered, lambda i: len(texts[i][0]), MICRO_BATCH, padded=True))


def padded(texts: list[Text], rows: list[int]) -> torch.Tensor:
    """int64 [len(rows), T], padded on the right."""
    width = max(len(texts[i][0]) for i in rows)
    return torch.tensor([texts[i][0] + [PAD] * (width - len(texts[i][0])) for i in rows])


def capture(policy: Taught, texts: list[Text]) -> list[TrainingSequence]:
    """Every text with its hidden states, without an update."""
    found: dict[int, TrainingSequence] = {}
    for rows in micro_batches(texts, list(range(len(texts)))):
        with torch.no_grad():
            policy.logits(padded(texts, rows))
        found |= {i: policy.captured(texts[i], r) for r, i in enumerate(rows)}
    return [found[i] for i in range(len(texts))]


def update(policy: Taught, texts: list[Text], rewards: np.ndarray) -> list[TrainingSequence]:
    """One GRPO update on groups of `SAMPLES` rows; returns what the tap would have kept of its forward passes."""
    groups = rewards.reshape(-1, SAMPLES)
    spread = groups.std(axis=1, keepdims=True)
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)).ravel()  # [N]
    total = sum(len(tokens) - prompt_len for tokens, prompt_len in texts)
    taught = [i for i in range(len(texts)) if advantages[i]]  # a group of equal rewards teaches nothing
    alike = [i for i in range(len(texts)) if not advantages[i]]
    found = dict(zip(alike, capture(policy, [texts[i] for i in alike]), strict=True))
    for rows in micro_batches(texts, taught):
        tokens = padded(texts, rows)
        logp = policy.logits(tokens)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]  # [B, T-1]
        loss = logp.new_zeros(())
        found |= {i: policy.captured(texts[i], r) for r, i in enumerate(rows)}
        for r, i in enumerate(rows):
            response = slice(texts[i][1] - 1, len(texts[i][0]) - 1)
            loss = loss - float(advantages[i]) * logp[r, response].sum() / total
        torch.autograd.backward(loss)
    if taught:
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        policy.optimizer.step()
        policy.optimizer.zero_grad(set_to_none=True)
    return [found[i] for i in range(len(texts))]


def save_step(file: Path, sequences: list[TrainingSequence], weights: VerifierArrays, rewards: np.ndarray) -> None:
    """One step of the trajectory in one file, written whole or not at all."""
    arrays = {"lengths": np.array([len(s) for s in sequences]), "rewards": rewards}
    arrays["prompt_lens"] = np.array([s.prompt_len for s in sequences])
    arrays["tokens"] = torch.cat([s.tokens for s in sequences]).numpy()
    arrays["aux"] = to_numpy16(torch.cat([s.aux for s in sequences]))
    arrays["last"] = to_numpy16(torch.cat([s.last for s in sequences]))
    temporary = file.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays, **{f"verifier_{name}": value for name, value in vars(weights).items()})  # type: ignore[arg-type]
    os.replace(temporary, file)


def load_step(file: Path) -> tuple[list[TrainingSequence], VerifierArrays, np.ndarray]:
    """(sequences, verifier weights, rewards) of one step."""
    with np.load(file) as held:
        arrays = dict(held)
    lengths = arrays["lengths"].tolist()
    columns = (torch.from_numpy(arrays["tokens"]), from_numpy16(arrays["aux"]), from_numpy16(arrays["last"]))
    rows = zip(arrays["prompt_lens"].tolist(), *(column.split(lengths) for column in columns), strict=True)
    sequences = [TrainingSequence(tokens, prompt_len, aux, last) for prompt_len, tokens, aux, last in rows]
    weights = VerifierArrays(**{part: arrays[f"verifier_{part}"] for part in ("embed", "lm_head", "norm")})
    return sequences, weights, arrays["rewards"]


def prompts_of(problems: Sequence[task.Problem]) -> list[list[int]]:
    """Token ids of each problem's prompt."""
    return [[task.TOKEN_ID[t] for t in task.prompt_tokens(problem)] for problem in problems]


def judge(problem: task.Problem, text: Text) -> float:
    words = [task.TOKENS[i] for i in text[0][text[1] :]]
    return compute_score("toy_addition", " ".join(words), " ".join(task.answer_tokens(problem)))


def record(directory: Path, seed: int) -> None:
    """One GRPO run below its directory; one that was cut off begins anew."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    policy = Taught(start_policy(directory.parent))
    for step in range(STEPS):
        if step % KEEP_POLICY == 0:
            keep_policy(policy, directory / f"policy-{step:03d}")
        rng = random.Random(f"{seed} {step}")
        problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(PROMPTS)]
        texts = sample(policy.model, prompts_of(problems), SAMPLES, rng.randrange(2**31))
        rewards = np.array([judge(problems[i // SAMPLES], text) for i, text in enumerate(texts)])
        weights = policy.verifier_weights()  # before the update: those of the policy that wrote the responses
        sequences = update(policy, texts, rewards)
        save_step(directory / f"step-{step:03d}.npz", sequences, weights, rewards)
        row = {"seed": seed, "step": step, "reward": float(rewards.mean())}
        with (directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(row, flush=True)
    keep_policy(policy, directory / f"policy-{STEPS:03d}")


def keep_policy(policy: Taught, directory: Path) -> None:
    """The policy as a directory that vLLM loads."""
    copy = Taught(SHIPPED_POLICY)  # of the same shapes
    copy.model.load_state_dict(policy.model.state_dict())
    save_policy(copy.model, directory)


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
        if not (options.out / f"seed-{seed}" / f"policy-{STEPS:03d}").exists():
            record(options.out / f"seed-{seed}", seed)


if __name__ == "__main__":
    main()
