"""Does training the drafter during RL pay? The drafters that three starts lead to, online and offline, step by step.

    python -m benchmarks.drafter.trajectory --out study      # the policy's runs, once
    python -m benchmarks.drafter.study --out study           # every variant on them
    python -m benchmarks.drafter.serve --out study           # what vLLM accepts of each, and how fast it is with it

The variants of a seed share its recorded trajectory (speculation is lossless: they would have written the same text).
The online drafter goes through what a run does at every RL step: a session on the steps before, of as many tokens as a
bubble gives, this step's capture into the buffer, merge, and the gate. Learner, buffer, merge and gate are the
plugin's own. What would be served is written down every `KEEP_POLICY` steps, with the acceptance that the run would
have told its engines then.

Starts, each warmed up anew for each seed: `random` is an untrained head; `in_domain` learned on responses of the start
policy; `generic` from the same policy's hidden states on text of another kind, short additions without the re-checks
that long responses are made of, with as many tokens. The frozen drafter stays as it started; the `extra` one has
learned offline, before the run, as many tokens more of its start's text as the online one sees during the run. Called
again, the command leaves out what is whole.
"""

import functools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafter.trajectory import (
    KEEP_POLICY,
    MAX_DIGITS,
    MAX_RESPONSE,
    STEPS,
    Taught,
    Text,
    capture,
    load_step,
    prompts_of,
    read_options,
    sample,
    start_policy,
)
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    SequenceScore,
    TrainingSequence,
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
from verl_tlt.messages.training import DrafterProvenance, HeldOutScores, MergeFacts, RolloutSampling
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.merge import average_slice
from verl_tlt.spot_worker.scoring import FEWEST_PROMPTS, HELD_OUT_TOKENS, counts, score_versions
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
CONFIG = TLTConfig.from_dict(
    {
        "drafter": {"aux_layers": AUX_LAYERS["small"], "batch_tokens": 256, "learning_rate": 2e-3},
        "buffer": {"min_tokens": 1000, "held_out": 0.05},
        "speculation": {"max_draft_length": K},
    }
)
"""The defaults, with the demo recipe's learning rate, micro-batches small enough for `SESSION_STEPS` of them, and half
as many texts for the gate: judging is most of what a step of the study costs."""


# ---------------------------------------------------------------------- learners without a run


def merge(learners: Sequence[SpotLearner], trained: Sequence[SpotLearner] | None = None) -> MergeFacts:
    """Merge what some of them trained (None: all), as spot workers do after their sessions."""
    merged = average_slice([learner.hand_in(1)[0] for learner in trained or learners], last=True)
    for learner in learners:
        learner.adopt(merged)
    return merged.facts


def score(
    learner: SpotLearner, sequences: list[TrainingSequence], which: Sequence[str], max_draft: int
) -> dict[str, list[SequenceScore]]:
    """Score some of its versions, on the CPU."""
    versions = {one: learner.versions.of(one) for one in which}
    found = score_versions(
        learner.trainer, versions, sequences, learner.sampling, max_draft, learner.whole_head, lambda: False
    )
    assert found is not None
    return found


def score_for_gate(learner: SpotLearner, sequences: list[TrainingSequence], max_draft: int) -> HeldOutScores:
    """What the gate would be told of its candidate."""
    found = learner._score_held_out(sequences, max_draft, lambda: False)
    assert found is not None
    return found


# ---------------------------------------------------------------------- the drafters that runs start from


@functools.cache
def own_texts(out: Path, count: int, seed: int) -> list[Text]:
    """Responses of the start policy, as a user's warm-up generates them: (ids, prompt length)."""
    rng = random.Random(f"warm-up {seed}")
    problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(count)]
    return sample(Taught(start_policy(out)).model, prompts_of(problems), 1, seed=10**6 + seed)


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
    model = build_drafter(SHIPPED_POLICY, aux_layers=AUX_LAYERS["small"], seed=seed, max_position_embeddings=512)
    if start == "random":
        save_drafter(filled(model, policy), directory, {"tokens": 0, "acceptance": []}, training_state=None)
    else:
        # Texts of `generic` are about a third as long.
        count = WARMUP_TEXTS * (3 if start == "generic" else 1)
        warm_up(policy, model, TEXTS[start](out, count, seed), WARMUP_TOKENS, seed, directory)
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
        self.trajectory, self.drafters = out / f"seed-{seed}", out / "variants" / f"{start}-{seed}"
        self.begun, self.version = start_file(out, start, seed), 0
        sampling = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)
        self.learner = SpotLearner(f"{start}-{seed}", CONFIG, str(SHIPPED_POLICY), self.begun, sampling, "cpu")

    def advance(self, step: int) -> dict[str, Any]:
        """One RL step; returns what was seen."""
        learner = self.learner
        sequences, weights, _ = load_step(self.trajectory / f"step-{step:03d}.npz")
        learner.add(step, [], weights)
        row: dict[str, Any] = {"step": step, "version": self.version}
        if step % KEEP_POLICY == 0:
            row["told"] = self._told()
            learner.save(str(self.drafters / f"step-{step:03d}"), self._provenance(step, row["told"]))
        first = learner.trainer.steps
        session = learner.train(lambda: learner.trainer.steps - first >= SESSION_STEPS)
        learner.add(step, sequences, None)
        row["trained_tokens"] = session.tokens
        if session.steps:
            row["decision"] = self._learn()
        return row

    def _learn(self) -> str:
        """Merge, judge, and publish, hold or revert, by the trainer's rules, but without its delay."""
        learner = self.learner
        if not merge([learner]).included:
            return "waits"
        held_out = learner.buffer.held_out(HELD_OUT_TOKENS, FEWEST_PROMPTS)
        if not held_out:
            return "hold"
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
        return decision

    def _told(self) -> list[float]:
        """The served drafter's acceptance on what the run has held out."""
        if self.version == 0:
            return list(self.begun.acceptance)
        held_out = self.learner.buffer.held_out()
        scores = score(self.learner, held_out, ["served"], TOLD)["served"]
        return conditional(counts(scores, TOLD).sum(axis=0)) if held_out else []

    def _provenance(self, step: int, told: list[float]) -> DrafterProvenance:
        return DrafterProvenance(
            version=self.version,
            policy_step=step,
            policy=str(SHIPPED_POLICY),
            data=str(self.trajectory),
            data_sha256=None,
            objective=CONFIG.drafter.objective,
            temperature=1.0,
            acceptance=told,
            tokens_trained=0,
        )


def read_acceptance(drafter: Path) -> list[float]:
    """What a saved drafter's provenance tells of it."""
    return list(json.loads((drafter / "provenance.json").read_text())["acceptance"])


def run(out: Path, start: str, seed: int) -> None:
    """The variant on its whole run, anew if it was cut off; then the offline drafter that has seen as much."""
    file = out / "variants" / f"{start}-{seed}.jsonl"
    if not file.exists():
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        variant, rows = Variant(out, start, seed), []
        for step in range(STEPS):
            rows.append(variant.advance(step))
            print(start, seed, rows[-1], flush=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make_extra(out, start, seed, sum(row["trained_tokens"] for row in lines_of(file)))


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Rows of a file with one JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    options = read_options(__doc__)
    torch.set_num_threads(1)
    (options.out / "variants").mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for start in STARTS:
            run(options.out, start, seed)


if __name__ == "__main__":
    main()
