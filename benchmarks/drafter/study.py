"""Does training the drafter during RL pay? Accept length by RL step: none, frozen and online, from three starts.

    python -m benchmarks.drafter.trajectory --out study      # the policy's runs, once
    python -m benchmarks.drafter.study --out study           # every variant on them; interrupt and repeat at will

The variants of a seed share its recorded trajectory (speculation is lossless: they would have written the same text).
At every RL step the frozen and the online drafter are scored on that step's responses under that step's policy; then
the online one goes through what a run does: a session on the steps before, of as many tokens as a bubble gives, this
step's capture into the buffer, merge, and the gate. Learner, buffer, merge and gate are the plugin's own.

Starts: `random` is an untrained head (another one for each seed); `in_domain` was warmed up on responses of the start
policy; `generic` learned from the same policy's hidden states on text of another kind, short additions without the
re-checks that long responses are made of, with as many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter.trajectory import MAX_RESPONSE, SAVE_POLICY, Taught, Text, TorchSampler, capture, load_step
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    VerifierWeights,
    build_drafter,
    from_numpy16,
    load_drafter,
    pack,
    refresh_verifier_weights,
    save_drafter,
    to_drafter_file,
    train_until,
)
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, RolloutSampling
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.learner import SpotLearner, counts
from verl_tlt.spot_worker.merge import merge
from verl_tlt.trainer.gate import decide

STARTS = ("random", "generic", "in_domain")
K = 3
SESSION_STEPS = 8
"""Micro-batches of a session: about 0.9 trained tokens per generated one, as in the demo's bubbles."""
SCORED = 2
"""Every second response of a step is scored: half of each group."""
WARMUP_TEXTS, WARMUP_TOKENS = 256, 90_000
BLOCK = 5
"""RL steps between two states to resume from."""
CONFIG = TLTConfig.from_dict(
    {
        "drafter": {"aux_layers": AUX_LAYERS["small"], "batch_tokens": 256, "learning_rate": 2e-3},
        "buffer": {"min_tokens": 1000},
        "speculation": {"max_draft_length": K},
    }
)
"""The defaults, with the demo recipe's learning rate and micro-batches small enough for `SESSION_STEPS` of them."""


def new_drafter(seed: int) -> Any:
    """A random head for the toy's policy."""
    return build_drafter(SHIPPED_POLICY, aux_layers=AUX_LAYERS["small"], seed=seed, max_position_embeddings=512)


def own_texts(count: int) -> list[Text]:
    """Responses of the start policy, as a user's warm-up generates them: (ids, prompt length)."""
    rng = random.Random("warm-up")
    prompts = [[task.TOKEN_ID[t] for t in task.prompt_tokens(task.sample_problem(rng))] for _ in range(count)]
    return TorchSampler().generate(Taught().model, prompts, 1, seed=10**6)


def other_texts(count: int) -> list[Text]:
    """Written by the task's generator: one to four columns, no re-checks, plain answer."""
    rng = random.Random("generic")
    texts = []
    for _ in range(count):
        problem = task.sample_problem(rng, max_digits=4)
        prompt, response = task.prompt_tokens(problem), task.sample_response(problem, rng)
        body = response[: response.index(task.CHECK)] if task.CHECK in response else response[: -2 * problem.digits - 4]
        words = [*prompt, *body, task.ANSWER, *task.answer_tokens(problem), task.EOS]
        texts.append(([task.TOKEN_ID[w] for w in words][: MAX_RESPONSE + len(prompt)], len(prompt)))
    return texts


def warm_up(texts: list[Text], directory: Path, name: str) -> None:
    """Train a head on `texts` under the start policy and save it."""
    policy = Taught()
    model = new_drafter(seed=0)
    weights = vars(policy.verifier_weights())
    refresh_verifier_weights(model, VerifierWeights(**{part: from_numpy16(v) for part, v in weights.items()}))
    trainer = DrafterTrainer(model, learning_rate=2e-3, ttt_steps=CONFIG.drafter.passes)
    buffer = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0)
    for i, sequence in enumerate(capture(policy, texts)):
        buffer.add(0, i, sequence)
    rng = random.Random(0)

    def batches() -> Iterator[Any]:
        while True:
            yield pack([window for window in buffer.sample_batch(rng, 512) if len(window) > 1])

    done = train_until(trainer, batches(), lambda: False, max_tokens=WARMUP_TOKENS)
    save_drafter(model, directory, {"start": name, "tokens": done.tokens, "loss": done.loss}, training_state=None)
    print(f"{name}: {len(texts)} texts, {done.tokens} tokens trained", flush=True)


def make_starts(out: Path, starts: list[str]) -> None:
    """Those heads among `starts` that are trained before the run."""
    for name, texts in (("generic", other_texts), ("in_domain", own_texts)):
        directory = out / "starts" / name
        if name in starts and not directory.exists():
            # Texts of `generic` are about a third as long.
            warm_up(texts(WARMUP_TEXTS * (3 if name == "generic" else 1)), directory, name)


def start_file(out: Path, start: str, seed: int) -> DrafterFile:
    """The drafter a run starts from."""
    model = new_drafter(seed) if start == "random" else load_drafter(out / "starts" / start, SHIPPED_POLICY)
    config, weights, fingerprint = to_drafter_file(model, "float32")
    return DrafterFile(0, config, weights, fingerprint)


class Variant:
    """The online drafter of one start and seed, with its frozen twin, on a recorded trajectory."""

    def __init__(self, out: Path, start: str, seed: int) -> None:
        self.start, self.seed = start, seed
        self.trajectory = out / f"seed-{seed}"
        self.rows = out / "variants" / f"{start}-{seed}.jsonl"
        self.saved = out / "variants" / f"{start}-{seed}.pt"
        self.drafters = out / "variants" / f"{start}-{seed}"
        self.learner = SpotLearner(
            f"{start}-{seed}",
            CONFIG,
            str(SHIPPED_POLICY),
            start_file(out, start, seed),
            RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1),
            "cpu",
        )
        self.step = self.version = 0
        if self.saved.exists():
            self._resume()

    def available(self, steps: int) -> bool:
        """Whether the next step has been recorded."""
        return self.step < steps and self._file(self.step).exists()

    def advance(self) -> dict[str, Any]:
        """One RL step; returns what was seen."""
        learner = self.learner
        sequences, weights, _ = load_step(self._file(self.step))
        # Engines share the policy's embedding and head, so both drafters follow them.
        learner.add(self.step, [], weights)
        scores = learner.score_on(sequences[::SCORED], ("served", "initial"), K)
        row: dict[str, Any] = {"step": self.step, "version": self.version}
        for which, scored in (("served", "served"), ("frozen", "initial")):
            total = counts(scores[scored], K).sum(axis=0)  # [1+K]
            row[which] = [round(float(c), 3) for c in total]
            row[f"{which}_tau"] = round(float(total.sum() / total[0]), 4)
        if self.step % SAVE_POLICY == 0:
            learner.save(str(self.drafters / f"step-{self.step:03d}"), self._provenance())
        first = learner.trainer.steps
        session = learner.train(lambda: learner.trainer.steps - first >= SESSION_STEPS)
        learner.add(self.step, sequences, None)
        row |= {"trained_tokens": session.tokens, "train_s": round(session.seconds, 2)}
        if session.steps:
            row |= self._learn()
        self.step += 1
        return row

    def _learn(self) -> dict[str, Any]:
        """Merge, judge, and publish, hold or revert, as the trainer does between two rollouts."""
        learner = self.learner
        merged = merge([learner.contribute()], min_steps=CONFIG.spot.min_merge_steps)
        learner.adopt(merged)
        if merged.delta is None:
            return {"decision": "waits"}
        held_out = learner.score(K)
        if not len(held_out.positions):
            return {"decision": "hold"}
        decision = decide(held_out, CONFIG.gate, seed=self.version).action
        if decision == "publish":
            learner.keep("served")
            self.version += 1
        elif decision != "hold":
            learner.revert(decision.removeprefix("revert_"))
            if decision == "revert_initial":
                learner.keep("served")
                self.version += 1
        return {"decision": decision}

    def save(self) -> None:
        """State to resume from; the buffer is made again from the trajectory."""
        learner = self.learner
        state = {
            "step": self.step,
            "version": self.version,
            "trainer": learner.trainer.state(),
            "agreed": {w: {n: torch.from_numpy(v) for n, v in p.items()} for w, p in vars(learner.agreed()).items()},
            "unmerged": (learner.unmerged_steps, learner.unmerged_tokens),
            "rng": learner.rng.getstate(),
        }
        torch.save(state, self.saved.with_suffix(".tmp"))
        os.replace(self.saved.with_suffix(".tmp"), self.saved)

    def _resume(self) -> None:
        learner = self.learner
        state = torch.load(self.saved, weights_only=True)
        agreed = {w: {n: v.numpy() for n, v in p.items()} for w, p in state["agreed"].items()}
        learner.base, learner.kept = agreed.pop("candidate"), agreed
        learner.trainer.load_state(state["trainer"])
        learner.unmerged_steps, learner.unmerged_tokens = state["unmerged"]
        version, internal, gauss = state["rng"]
        learner.rng.setstate((version, tuple(internal), gauss))
        self.step, self.version = state["step"], state["version"]
        for step in range(max(0, self.step - CONFIG.buffer.keep_steps), self.step):
            learner.add(step, *load_step(self._file(step))[:2])
        rows = self.rows.read_text().splitlines()[: self.step]  # a later, unsaved part is done again
        self.rows.write_text("".join(f"{row}\n" for row in rows))

    def _provenance(self) -> DrafterProvenance:
        return DrafterProvenance(
            version=self.version,
            policy_step=self.step,
            policy=str(SHIPPED_POLICY),
            data=str(self.trajectory),
            data_sha256=None,
            objective=CONFIG.drafter.objective,
            temperature=1.0,
            acceptance=(),
            tokens_trained=0,
        )

    def _file(self, step: int) -> Path:
        return self.trajectory / f"step-{step:03d}.npz"


def run(out: Path, seeds: list[int], starts: list[str], steps: int) -> None:
    """Advance all variants side by side; wait where a trajectory is still being recorded."""
    (out / "variants").mkdir(parents=True, exist_ok=True)
    variants = [Variant(out, start, seed) for seed in seeds for start in starts]
    while any(variant.step < steps for variant in variants):
        moved = False
        for variant in variants:
            if not variant.available(steps):
                continue
            moved, row = True, variant.advance()
            with variant.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(variant.start, variant.seed, row, flush=True)
            if variant.step % BLOCK == 0:
                variant.save()
        if not moved:
            time.sleep(5.0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make_starts(options.out, options.starts)
    run(options.out, options.seeds, options.starts, options.steps)


if __name__ == "__main__":
    main()
