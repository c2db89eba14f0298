"""Does training the drafter during RL pay? The drafters that three starts lead to, online and offline, step by step.

    python -m benchmarks.drafter.trajectory --out study      # the policy's runs, once
    python -m benchmarks.drafter.study --out study           # every variant on them; interrupt and repeat at will
    python -m benchmarks.drafter.serve --out study           # what vLLM accepts of each, and how fast it is with it

The variants of a seed share its recorded trajectory (speculation is lossless: they would have written the same text).
The online drafter goes through what a run does at every RL step: a session on the steps before, of as many tokens as a
bubble gives, this step's capture into the buffer, merge, and the gate. Learner, buffer, merge and gate are the
plugin's own. What would be served is written down every `KEEP_POLICY` steps, with the acceptance that the run would
have told its engines then.

Starts, each warmed up anew for each seed: `random` is an untrained head; `in_domain` learned on responses of the start
policy; `generic` from the same policy's hidden states on text of another kind, short additions without the re-checks
that long responses are made of, with as many tokens. The frozen drafter stays as it started; the `extra` one has
learned offline, before the run, as many tokens more of its start's text as the online one sees during the run.
"""

import argparse
import functools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafter.learners import merge, score, score_for_gate
from benchmarks.drafter.trajectory import (
    KEEP_POLICY,
    MAX_DIGITS,
    MAX_RESPONSE,
    Taught,
    Text,
    capture,
    load_step,
    sample,
    start_policy,
)
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    VerifierWeights,
    acceptance,
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
from verl_tlt.messages.training import VERSIONS, DrafterProvenance, RolloutSampling
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.scoring import FEWEST_PROMPTS, HELD_OUT_TOKENS, counts
from verl_tlt.spot_worker.versions import DrafterVersions
from verl_tlt.trainer.gate import decide

STARTS = ("random", "generic", "in_domain")
K = 3
"""Draft length that the gate judges by."""
TOLD = 7
"""Draft positions whose acceptance engines are told."""
SESSION_STEPS = 8
"""Micro-batches of a session: about a quarter of a trained token per generated one; the demo's bubbles give 0.9."""
HELD_OUT = 24
"""Texts that a warm-up is scored on."""
WARMUP_TEXTS, WARMUP_TOKENS = 256, 90_000
BLOCK = 5
"""RL steps between two states to resume from."""
CONFIG = TLTConfig.from_dict(
    {
        "drafter": {"aux_layers": AUX_LAYERS["small"], "batch_tokens": 256, "learning_rate": 2e-3},
        "buffer": {"min_tokens": 1000, "held_out": 0.05},
        "speculation": {"max_draft_length": K},
    }
)
"""The defaults, with the demo recipe's learning rate, micro-batches small enough for `SESSION_STEPS` of them, and half
as many texts for the gate: judging is most of what a step of the study costs."""


def new_drafter(seed: int) -> Any:
    return build_drafter(SHIPPED_POLICY, aux_layers=AUX_LAYERS["small"], seed=seed, max_position_embeddings=512)


@functools.cache
def own_texts(out: Path, count: int, seed: int) -> list[Text]:
    """Responses of the start policy, as a user's warm-up generates them: (ids, prompt length)."""
    rng = random.Random(f"warm-up {seed}")
    problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(count)]
    prompts = [[task.TOKEN_ID[t] for t in task.prompt_tokens(problem)] for problem in problems]
    return sample(Taught(start_policy(out)).model, prompts, 1, seed=10**6 + seed)


def other_texts(out: Path, count: int, seed: int) -> list[Text]:
    """Written by the task's generator: one to four columns, no re-checks, plain answer."""
    rng = random.Random(f"generic {seed}")
    texts = []
    for _ in range(count):
        problem = task.sample_problem(rng, max_digits=4)
        prompt, response = task.prompt_tokens(problem), task.sample_response(problem, rng)
        body = response[: response.index(task.CHECK)] if task.CHECK in response else response[: -2 * problem.digits - 4]
        words = [*prompt, *body, task.ANSWER, *task.answer_tokens(problem), task.EOS]
        texts.append(([task.TOKEN_ID[w] for w in words][: MAX_RESPONSE + len(prompt)], len(prompt)))
    return texts


def warm_up(policy: Taught, model: Any, texts: list[Text], tokens: int, seed: int, directory: Path) -> None:
    """Train `model` on `texts` under `policy`, and save it with its acceptance on the last of them."""
    trainer = DrafterTrainer(filled(model, policy), learning_rate=2e-3, ttt_steps=CONFIG.drafter.passes)
    buffer = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0)
    sequences = capture(policy, texts)
    for i, sequence in enumerate(sequences[:-HELD_OUT]):
        buffer.add(0, i, sequence)
    rng = random.Random(seed)

    def batches() -> Iterator[Any]:
        while True:
            yield pack([window for window in buffer.sample_batch(rng, 512) if len(window) > 1])

    done = train_until(trainer, batches(), lambda: False, max_tokens=tokens)
    scores = acceptance(model, sequences[-HELD_OUT:], temperature=1.0, max_draft=TOLD)
    facts = {"tokens": done.tokens, "loss": done.loss, "acceptance": conditional(counts(scores, TOLD).sum(axis=0))}
    save_drafter(model, directory, facts, training_state=None)
    print(f"{directory.name}: {len(texts)} texts, {done.tokens} tokens trained, {facts['acceptance']}", flush=True)


def conditional(total: Sequence[float] | np.ndarray) -> list[float]:
    """P(position i accepted | all before accepted) of counts [1+K]; empty where nothing was drafted."""
    reached = np.asarray(total, dtype=float)
    return [round(float(p), 4) for p in reached[1:] / np.maximum(reached[:-1], 1e-9)] if reached[0] else []


TEXTS = {"generic": other_texts, "in_domain": own_texts, "random": own_texts}


def make_start(out: Path, start: str, seed: int) -> Path:
    """The drafter a run starts from, warmed up unless it is random; made only once."""
    directory = out / "starts" / f"{start}-{seed}"
    if directory.exists():
        return directory
    policy = Taught(start_policy(out))
    if start == "random":
        model = filled(new_drafter(seed), policy)
        save_drafter(model, directory, {"tokens": 0, "acceptance": []}, training_state=None)
    else:
        # Texts of `generic` are about a third as long.
        count = WARMUP_TEXTS * (3 if start == "generic" else 1)
        warm_up(policy, new_drafter(seed), TEXTS[start](out, count, seed), WARMUP_TOKENS, seed, directory)
    return directory


def make_extra(out: Path, start: str, seed: int, tokens: int) -> Path:
    """The same drafter after `tokens` more of fresh text of the same kind, offline."""
    directory = out / "starts" / f"{start}-{seed}-extra"
    if not directory.exists():
        model = load_drafter(make_start(out, start, seed), SHIPPED_POLICY)
        per_text = WARMUP_TOKENS / WARMUP_TEXTS / (3 if start == "generic" else 1)
        policy = Taught(start_policy(out))
        texts = TEXTS[start](out, 16 * round(tokens / per_text / 16), seed + 1000)
        warm_up(policy, model, texts, tokens, seed + 1000, directory)
    return directory


def filled(model: Any, policy: Taught) -> Any:
    """With the policy's embedding, head and norm."""
    weights = vars(policy.verifier_weights())
    refresh_verifier_weights(model, VerifierWeights(**{part: from_numpy16(v) for part, v in weights.items()}))
    return model


def start_file(out: Path, start: str, seed: int) -> DrafterFile:
    model = load_drafter(make_start(out, start, seed), SHIPPED_POLICY)
    config, weights, fingerprint = to_drafter_file(model, "float32")
    return DrafterFile(0, config, weights, fingerprint, tuple(read_acceptance(make_start(out, start, seed))))


class Variant:
    """The online drafter of one start and seed, on a recorded trajectory."""

    def __init__(self, out: Path, start: str, seed: int) -> None:
        self.out, self.start, self.seed = out, start, seed
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
        return self.step < steps and self._file(self.step).exists()

    def advance(self) -> dict[str, Any]:
        """One RL step; returns what was seen."""
        learner = self.learner
        sequences, weights, _ = load_step(self._file(self.step))
        learner.add(self.step, [], weights)
        row: dict[str, Any] = {"step": self.step, "version": self.version}
        if self.step % KEEP_POLICY == 0:
            row["told"] = self._told()
            learner.save(str(self.drafters / f"step-{self.step:03d}"), self._provenance(row["told"]))
        first = learner.trainer.steps
        session = learner.train(lambda: learner.trainer.steps - first >= SESSION_STEPS)
        learner.add(self.step, sequences, None)
        row |= {"trained_tokens": session.tokens, "train_s": round(session.seconds, 2)}
        if session.steps:
            row |= self._learn()
        self.step += 1
        return row

    def _learn(self) -> dict[str, Any]:
        """Merge, judge, and publish, hold or revert, by the trainer's rules, but without its delay."""
        learner = self.learner
        if not merge([learner]).included:
            return {"decision": "waits"}
        held_out = learner.buffer.held_out(HELD_OUT_TOKENS, FEWEST_PROMPTS)
        if not held_out:
            return {"decision": "hold"}
        scores = score_for_gate(learner, held_out, K)
        decision = decide(scores, CONFIG.gate, seed=self.version).action
        if decision == "publish":
            learner.mark_published()
            self.version += 1
        elif decision != "hold":
            learner.revert(decision.removeprefix("revert_"))
            if decision == "revert_initial":
                learner.mark_published()
                self.version += 1
        return {"decision": decision}

    def _told(self) -> list[float]:
        """The served drafter's acceptance on what the run has held out."""
        if self.version == 0:
            return list(read_acceptance(make_start(self.out, self.start, self.seed)))
        held_out = self.learner.buffer.held_out()
        scores = score(self.learner, held_out, ["served"], TOLD)["served"]
        return conditional(counts(scores, TOLD).sum(axis=0)) if held_out else []

    def save(self) -> None:
        """State to resume from; the buffer is made again from the trajectory."""
        learner = self.learner
        state = {
            "step": self.step,
            "version": self.version,
            "trainer": learner.trainer.state(),
            "agreed": {which: {n: torch.from_numpy(v) for n, v in p.items()} for which, p in self._versions().items()},
            "unmerged": (learner.unmerged_steps, learner.unmerged_tokens),
            "rng": learner.rng.getstate(),
        }
        torch.save(state, self.saved.with_suffix(".tmp"))
        os.replace(self.saved.with_suffix(".tmp"), self.saved)

    def _versions(self) -> dict[str, Any]:
        return {which: self.learner.versions.of(which) for which in VERSIONS}  # nothing is exported between steps

    def _resume(self) -> None:
        learner = self.learner
        state = torch.load(self.saved, weights_only=True)
        agreed = {w: {n: v.numpy() for n, v in p.items()} for w, p in state["agreed"].items()}
        learner.versions = DrafterVersions(**agreed)
        learner.trainer.load_state(state["trainer"])
        learner.unmerged_steps, learner.unmerged_tokens = state["unmerged"]
        version, internal, gauss = state["rng"]
        learner.rng.setstate((version, tuple(internal), gauss))
        self.step, self.version = state["step"], state["version"]
        for step in range(max(0, self.step - CONFIG.buffer.keep_steps), self.step):
            learner.add(step, *load_step(self._file(step))[:2])
        rows = self.rows.read_text().splitlines()[: self.step]  # a later, unsaved part is done again
        self.rows.write_text("".join(f"{row}\n" for row in rows))

    def _provenance(self, told: list[float]) -> DrafterProvenance:
        return DrafterProvenance(
            version=self.version,
            policy_step=self.step,
            policy=str(SHIPPED_POLICY),
            data=str(self.trajectory),
            data_sha256=None,
            objective=CONFIG.drafter.objective,
            temperature=1.0,
            acceptance=told,
            tokens_trained=0,
        )

    def _file(self, step: int) -> Path:
        return self.trajectory / f"step-{step:03d}.npz"


def read_acceptance(drafter: Path) -> list[float]:
    """What a saved drafter's provenance tells of it."""
    return list(json.loads((drafter / "provenance.json").read_text())["acceptance"])


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
    for variant in variants:
        rows = [json.loads(line) for line in variant.rows.read_text().splitlines()]
        make_extra(out, variant.start, variant.seed, sum(row["trained_tokens"] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--steps", type=int, default=65)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run(options.out, options.seeds, options.starts, options.steps)


if __name__ == "__main__":
    main()
