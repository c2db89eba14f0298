"""Does training the drafter during RL pay? The drafters that three starts lead to, online and offline, step by step.

    python -m benchmarks.drafter.trajectory --out study      # the policy's runs, once
    python -m benchmarks.drafter.study --out study           # every variant on them
    python -m benchmarks.drafter.serve --out study           # what vLLM accepts of each, and how fast it is with it

The variants of a seed share its recorded trajectory (speculation is lossless: they would have written the same text).
The online drafter goes through what a run does at every RL step: a session on the steps before, of as many tokens as
idle time gives, and this step's capture into the buffer. Spot trainer, buffer and gate are the plugin's own. What would
be served is written down every `SERVED_EVERY` steps, with the acceptance that the run would have told its engines then.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter.trajectory import (
    MAX_DIGITS,
    MAX_RESPONSE,
    file_of,
    lines_of,
    load_model,
    policy_of,
    prompts_of,
    read_options,
    sample,
    start_policy,
    texts_of,
)
from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    Library,
    PolicyStates,
    SequenceScore,
    Text,
    TrainingSequence,
    VerifierWeights,
    acceptance,
    batches,
    build_drafter,
    load_drafter,
    load_policy,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    to_drafter_file,
    to_numpy16,
    train_until,
)
from verl_tlt.drafter.evaluate import combined_score
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, RolloutSampling, SpotPlan, VerifierArrays
from verl_tlt.spot_trainer.trainer import SpotTrainer

STARTS = ("random", "generic", "in_domain")
K = 3
"""Draft length that the gate judges by."""
TOLD = 7
"""Draft positions whose acceptance engines are told."""
SESSION_STEPS = 8
"""Micro-batches of a session: about a quarter of a trained token per generated one; the demo's bubbles give 0.9."""
SERVED_EVERY = 16
"""RL steps between two whose drafters are kept, and served."""
HELD_OUT = 24
"""Texts that a warm-up is scored on."""
WARMUP_TEXTS, WARMUP_TOKENS = 256, 90_000
CONFIG = TLTConfig.from_dict(
    {
        "drafter": {"batch_tokens": 256, "learning_rate": 2e-3},
        "buffer": {"min_tokens": 1000, "held_out": 0.05},
        "speculation": {"max_draft_length": K},
    }
)
"""The defaults, with the demo recipe's learning rate, micro-batches small enough for `SESSION_STEPS` of them, and half
as many texts for the gate: judging is most of what a step of the study costs."""


# ---------------------------------------------------------------------- the drafters that runs start from


def captured(policy: Path, texts: Sequence[Text]) -> list[TrainingSequence]:
    """Every text with the hidden states that a tap would keep of it, in 16 bits."""
    states = PolicyStates(load_policy(policy, "cpu"), AUX_LAYERS["small"])
    found = Library(states, texts, max_bytes=0).get(range(len(texts)))
    return [replace(one, aux=one.aux.bfloat16(), last=one.last.bfloat16()) for one in found]


@functools.cache
def own_texts(out: Path, count: int, seed: int) -> list[Text]:
    """Responses of the start policy, as a user's warm-up generates them."""
    rng = random.Random(f"warm-up {seed}")
    problems = [task.sample_problem(rng, MAX_DIGITS) for _ in range(count)]
    return sample(load_model(start_policy(out)), prompts_of(problems), 1, seed=10**6 + seed)


def other_texts(out: Path, count: int, seed: int) -> list[Text]:
    """Written by the task's generator: one to four columns, no re-checks, plain answer."""
    rng = random.Random(f"generic {seed}")
    texts = []
    for _ in range(count):
        problem = task.sample_problem(rng, max_digits=4)
        prompt, response = task.prompt_tokens(problem), task.sample_response(problem, rng)
        body = response[: response.index(task.CHECK)] if task.CHECK in response else response[: -2 * problem.digits - 4]
        words = [*prompt, *body, task.ANSWER, *task.answer_tokens(problem), task.EOS]
        texts.append(Text(tuple(task.TOKEN_ID[w] for w in words[: MAX_RESPONSE + len(prompt)]), len(prompt)))
    return texts


def warm_up(policy: Path, model: Any, texts: list[Text], tokens: int, seed: int, directory: Path) -> None:
    """Train `model` on `texts` under `policy`, and save it with its acceptance on the last of them."""
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(policy))
    trainer = DrafterTrainer(model, learning_rate=2e-3, ttt_steps=CONFIG.drafter.passes)
    sequences, rng = captured(policy, texts), random.Random(seed)
    drawn = (rng.choice(sequences[:-HELD_OUT]) for _ in iter(int, 1))
    done = train_until(trainer, batches(drawn, 512), lambda: False, max_tokens=tokens)
    scores = acceptance(model, sequences[-HELD_OUT:], temperature=1.0, max_draft=TOLD)
    facts = {"tokens": done.tokens, "loss": done.loss, "acceptance": told(scores)}
    save_drafter(model, directory, facts, training_state=None)
    print(f"{directory.name}: {len(texts)} texts, {done.tokens} tokens trained, {facts['acceptance']}", flush=True)


def told(scores: list[SequenceScore]) -> list[float]:
    """P(position i accepted | all before accepted); empty where nothing was drafted."""
    whole = combined_score(scores, TOLD)
    return [round(float(p), 4) for p in whole.accept] if whole.drafts else []


TEXTS = {"generic": other_texts, "in_domain": own_texts, "random": own_texts}


SHORT = {"generic": 3}
"""Of these texts so many are as long as one of the others."""


def make_start(out: Path, start: str, seed: int) -> Path:
    """The drafter a run starts from, warmed up unless it is random; made only once."""
    directory = out / "starts" / f"{start}-{seed}"
    if not directory.exists():
        policy = start_policy(out)
        model = build_drafter(SHIPPED_POLICY, aux_layers=AUX_LAYERS["small"], seed=seed, max_position_embeddings=512)
        if start == "random":
            refresh_verifier_weights(model, VerifierWeights.from_policy_dir(policy))
            save_drafter(model, directory, {"tokens": 0, "acceptance": []}, training_state=None)
        else:
            texts = TEXTS[start](out, WARMUP_TEXTS * SHORT.get(start, 1), seed)
            warm_up(policy, model, texts, WARMUP_TOKENS, seed, directory)
    return directory


def make_extra(out: Path, start: str, seed: int, tokens: int) -> None:
    """The same drafter after `tokens` more of fresh text of the same kind, offline."""
    directory = out / "starts" / f"{start}-{seed}-extra"
    if not directory.exists():
        model = load_drafter(make_start(out, start, seed), SHIPPED_POLICY)
        per_text = WARMUP_TOKENS / WARMUP_TEXTS / SHORT.get(start, 1)
        texts = TEXTS[start](out, 16 * round(tokens / per_text / 16), seed + 1000)
        warm_up(start_policy(out), model, texts, tokens, seed + 1000, directory)


class Variant:
    """The online drafter of one start and seed, on a recorded trajectory."""

    def __init__(self, out: Path, start: str, seed: int) -> None:
        self.out, self.seed = out, seed
        self.steps, self.drafters = lines_of(file_of(out, seed)), out / "variants" / f"{start}-{seed}"
        begun = make_start(out, start, seed)
        config, weights = to_drafter_file(load_drafter(begun, SHIPPED_POLICY), "float32")
        self.begun = DrafterFile(0, config, weights, tuple(provenance(begun)["acceptance"]))
        plan = SpotPlan(
            policy_dir=str(SHIPPED_POLICY), drafter=self.begun, dtype="float32",
            sampling=RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1), learning_rate=2e-3, batch_tokens=256,
            min_tokens=1000, held_out=0.05, max_draft=K, seed=seed,
        )  # fmt: skip
        self.spot = SpotTrainer(plan)

    def advance(self, step: int) -> dict[str, Any]:
        spot, policy = self.spot, policy_of(self.out, self.seed, step)
        parts = VerifierWeights.from_policy_dir(policy)
        weights = VerifierArrays(to_numpy16(parts.embed), to_numpy16(parts.lm_head), to_numpy16(parts.norm))
        spot.add(step, [], weights)
        row: dict[str, Any] = {"step": step, "version": spot.version}
        if step % SERVED_EVERY == 0:
            row["told"] = self._told()
            spot.save(str(self.drafters / f"step-{step:03d}"), self._provenance(step, row["told"]))
        first = spot.trainer.steps
        session = spot.train(0, lambda: spot.trainer.steps - first >= SESSION_STEPS)
        if session.verdict is not None:
            row["decision"] = session.verdict.decision
            if session.verdict.publishes:
                spot.export()
        spot.add(step, captured(policy, texts_of(self.steps[step])), weights)
        row["trained_tokens"] = session.tokens
        return row

    def _told(self) -> list[float]:
        """The served drafter's acceptance on what the run has held out."""
        if self.spot.version == 0:
            return list(self.begun.acceptance)
        with self.spot.trainer.holding(self.spot.served):
            held_out = self.spot.buffer.held_out()
            return told(acceptance(self.spot.model, held_out, temperature=1.0, max_draft=TOLD))

    def _provenance(self, step: int, told: list[float]) -> DrafterProvenance:
        return DrafterProvenance(
            version=self.spot.version,
            policy_step=step,
            policy=str(SHIPPED_POLICY),
            data=str(policy_of(self.out, self.seed, step)),
            objective=CONFIG.drafter.objective,
            temperature=1.0,
            acceptance=told,
            tokens_trained=0,
        )


def run(out: Path, start: str, seed: int) -> None:
    """The variant on its whole run, anew if it was cut off; then the offline drafter that has seen as much."""
    file = out / "variants" / f"{start}-{seed}.jsonl"
    if not file.exists():
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        variant, rows = Variant(out, start, seed), []
        for step in range(len(variant.steps)):
            rows.append(variant.advance(step))
            print(start, seed, rows[-1], flush=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make_extra(out, start, seed, sum(row["trained_tokens"] for row in lines_of(file)))


def main() -> None:
    options = read_options(__doc__)
    torch.set_num_threads(1)
    (options.out / "variants").mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for start in STARTS:
            run(options.out, start, seed)


if __name__ == "__main__":
    main()
