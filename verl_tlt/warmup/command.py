"""`verl-tlt warmup`: a drafter for a policy, from the policy's own responses to a file of prompts.

Four stages: vLLM answers the prompts; the policy's hidden states at every position of the answers are captured as
they are needed; the drafter trains on them until its budget is used up; it is judged on held-out prompts and saved.
Work in progress lives in `OUT.warmup` beside `OUT`; the same command goes on after a kill; `OUT` appears whole.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verl_tlt.config import OBJECTIVES
from verl_tlt.drafter.policy import DrafterError, check_aux_layers, policy_shape, unsupported
from verl_tlt.ownership import foreign
from verl_tlt.warmup.engine import GenerationJob, Response, SamplingSettings, find_device, generate
from verl_tlt.warmup.prompts import Prompts, load_tokenizer, read_prompts
from verl_tlt.warmup.train import Budget, TrainingRun

STATE = "state.safetensors"
"""In the working directory: the training run's."""
MIN_RESPONSE = 8
"""Mean tokens of a response below which there is nothing to draft."""


@dataclass(frozen=True)
class Warmup:
    """What the user asked for."""

    model: Path
    prompts: Path
    out: Path
    start: Path | None = None
    """A drafter to go on from; None: a random head."""
    aux_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    """Width of a new drafter's MLP; None: the policy's."""
    objective: str = "hass"
    loss: str = "kl_div"
    draft_vocab: int | None = None
    """Tokens the drafter may propose, the most frequent in the responses; None: all."""
    samples: int = 1
    """Responses per prompt."""
    limit: int | None = None
    """Use the first so many prompts."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    budget: Budget = field(default_factory=Budget)
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    draft_length: int = 3
    device: str = "auto"
    tensor_parallel: int = 1
    cache_gb: float = 8.0
    seed: int = 0

    @property
    def work(self) -> Path:
        """Where the run keeps what it has done so far."""
        return self.out.with_name(self.out.name + ".warmup")

    def facts(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        plain = json.loads(json.dumps(asdict(self), default=str))
        return {k: v for k, v in plain.items() if k not in ("out", "device", "cache_gb", "budget", "tensor_parallel")}


def warmup(settings: Warmup, console: Console) -> Path:
    """Run all stages; returns the drafter's directory.

    Raises:
        DrafterError: something the user can put right, in one sentence; nothing is left under the final name.
    """
    check(settings)
    prompts, device = _prompts(settings), find_device(settings.device)
    _begin(settings, prompts)
    with _bars(console) as bars:
        responses = _responses(settings, prompts, device, bars)
        run = _prepare(settings, prompts, responses, device)
        _train(run, bars)
    directory = _save(settings, prompts, responses, run)
    shutil.rmtree(settings.work)
    console.print(
        f"Wrote {directory}: accept length {max(run.taus):.2f} on held-out prompts, drafting {settings.draft_length}."
        f"\nNext: verl-tlt evaluate {directory} --model {settings.model}",
        highlight=False,
        soft_wrap=True,
    )
    return directory


def check(s: Warmup) -> None:
    """Everything that can be known before any work.

    Raises:
        DrafterError: the first thing that is wrong.
    """
    shape = policy_shape(s.model)
    if why := unsupported(shape.model_type):
        raise DrafterError(f"--model {s.model} is a {shape.model_type} model; {why}.")
    if s.out.exists():
        raise DrafterError(f"--out {s.out} exists; give another name, or remove it.")
    if s.objective not in OBJECTIVES:
        raise DrafterError(f"--objective must be {', '.join(OBJECTIVES)}, not {s.objective!r}.")
    find_device(s.device)
    if s.aux_layers is not None:
        check_aux_layers(s.aux_layers, shape.num_layers, "--aux-layers")
    if s.draft_vocab is not None and not 1 < s.draft_vocab <= shape.vocab_size:
        raise DrafterError(
            f"--draft-vocab must be 2..{shape.vocab_size}, the policy's vocabulary, not {s.draft_vocab}."
        )
    for name, value in {
        "--samples": s.samples,
        "--response-length": s.sampling.max_tokens,
        "--batch-tokens": s.batch_tokens,
        "--learning-rate": s.learning_rate,
        "--epochs": s.budget.epochs,
        "--max-steps": s.budget.steps,
        "--max-tokens": s.budget.tokens,
        "--max-minutes": s.budget.minutes,
        "--draft-length": s.draft_length,
        "--intermediate-size": 1 if s.intermediate_size is None else s.intermediate_size,
    }.items():
        if value <= 0:
            raise DrafterError(f"{name} must be above 0, not {value}.")
    if s.start is not None:
        if (s.aux_layers, s.draft_vocab, s.intermediate_size) != (None, None, None):
            raise DrafterError(
                "--drafter brings its own shape: leave out --aux-layers, --draft-vocab and --intermediate-size."
            )
        from verl_tlt.drafter import check_drafter, check_owner

        check_owner(s.start)
        check_drafter(s.start, s.model)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Text like "2,18,33" as numbers.

    Raises:
        DrafterError: not numbers.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DrafterError(f"--aux-layers must be numbers like 2,18,33, not {text!r}.") from None


def _prompts(s: Warmup) -> Prompts:
    longest = policy_shape(s.model).max_position_embeddings - s.sampling.max_tokens
    if longest < 1:
        raise DrafterError(
            f"--response-length {s.sampling.max_tokens} leaves no room for a prompt in the policy's "
            f"max_position_embeddings={longest + s.sampling.max_tokens}."
        )
    return read_prompts(s.prompts, load_tokenizer(s.model), longest, s.limit)


def _begin(s: Warmup, prompts: Prompts) -> None:
    """Make the working directory, or see that it belongs to a run with the same settings."""
    file = s.work / "run.json"
    for name in (file.name, STATE, "responses"):
        if reason := foreign(s.work / name):
            raise DrafterError(f"{s.work} may be another user's work: {reason}; give an --out in a place of your own.")
    wanted = {**s.facts(), "prompts_sha256": prompts.digest}
    if file.is_file():
        begun = json.loads(file.read_text())
        different = [key for key in wanted if begun.get(key) != wanted[key]]
        if different:
            key = different[0]
            raise DrafterError(
                f"{s.work} belongs to a run with {key}={begun.get(key)!r}, not {wanted[key]!r}; remove it to start "
                "again."
            )
        return
    s.work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(wanted))


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip


def _responses(s: Warmup, prompts: Prompts, device: str, bars: Progress) -> list[Response]:
    task = bars.add_task("generate", total=1, note="starting vLLM")
    job = GenerationJob(
        model=str(s.model),
        prompts=[list(prompt) for prompt in prompts.tokens],
        samples=s.samples,
        sampling=s.sampling,
        device=device,
        tensor_parallel=s.tensor_parallel,
    )

    def tell(done: int, total: int) -> None:
        if done:
            bars.update(task, completed=done, total=total, note=f"{done} of {total} responses")

    responses, _ = generate(job, s.work / "responses", tell)
    mean = sum(len(r.tokens) for r in responses) / len(responses)
    if mean < MIN_RESPONSE:
        raise DrafterError(
            f"The policy's responses have {mean:.1f} tokens on average, too few to learn from: is --prompts "
            f"{s.prompts} what this policy is asked in training?"
        )
    return responses


def _prepare(s: Warmup, prompts: Prompts, responses: list[Response], device: str) -> TrainingRun:
    """Drafter, policy and texts, brought together; an earlier try's state is loaded."""
    import transformers

    from verl_tlt.drafter import (
        DrafterTrainer,
        Library,
        PolicyStates,
        Text,
        VerifierWeights,
        load_policy,
        refresh_verifier_weights,
    )

    transformers.utils.logging.disable_progress_bar()  # there is one already
    texts = [Text((*prompts.tokens[r.prompt], *r.tokens), len(prompts.tokens[r.prompt])) for r in responses]
    drafter = _drafter(s, responses, device)
    parts = VerifierWeights.from_policy_dir(s.model)
    refresh_verifier_weights(drafter, parts)
    states = PolicyStates(load_policy(s.model, device), drafter.target_layer_ids)
    run = TrainingRun(
        DrafterTrainer(
            drafter, learning_rate=s.learning_rate, ttt_steps=OBJECTIVES[s.objective], loss=s.loss, seed=s.seed
        ),
        Library(states, texts, int(s.cache_gb * 1e9)),
        train=[i for i, r in enumerate(responses) if r.prompt not in prompts.held_out],
        judged=[i for i, r in enumerate(responses) if r.prompt in prompts.held_out],
        budget=s.budget,
        batch_tokens=s.batch_tokens,
        draft_length=s.draft_length,
        sampling={k: v for k, v in asdict(s.sampling).items() if k in ("temperature", "top_p", "top_k")},
        state_file=s.work / STATE,
        seed=s.seed,
        whole_head=parts.lm_head.to(device) if drafter.use_draft_vocab else None,
    )
    run.resume()
    return run


def _drafter(s: Warmup, responses: list[Response], device: str) -> Any:
    import torch

    from verl_tlt.drafter import build_drafter, load_drafter, most_frequent

    if s.start is not None:
        return load_drafter(s.start, s.model, device=device)
    draft_ids = None
    shape = policy_shape(s.model)
    if s.draft_vocab is not None and s.draft_vocab < shape.vocab_size:
        seen = torch.tensor([t for r in responses for t in r.tokens])
        draft_ids = most_frequent(torch.bincount(seen, minlength=shape.vocab_size), s.draft_vocab)
    return build_drafter(
        s.model,
        aux_layers=s.aux_layers,
        intermediate_size=s.intermediate_size,
        seed=s.seed,
        device=device,
        draft_ids=draft_ids,
    )


def _train(run: TrainingRun, bars: Progress) -> None:
    task = bars.add_task("train", total=1.0, note="")
    told = len(run.taus)

    def tell(run: TrainingRun) -> None:
        nonlocal told
        p = run.progress
        note = f"step {run.trainer.steps}, {p.tokens} tokens, loss {p.loss:.3f}, accept length {run.taus[-1]:.2f}"
        bars.update(task, completed=run.spent, note=note)
        if len(run.taus) > told:
            told = len(run.taus)
            bars.console.print(f"{100 * run.spent:3.0f} %  {note}", highlight=False)

    run(tell)


def _save(s: Warmup, prompts: Prompts, responses: list[Response], run: TrainingRun) -> Path:
    from verl_tlt.drafter import save_drafter

    scores = run.score()
    best = max(run.taus)
    accepted = [sum(float(score.accepted[k]) for score in scores) for k in range(s.draft_length)]
    before = [sum(score.drafts for score in scores), *accepted[:-1]]
    facts = {
        "policy": str(s.model),
        "started from": str(s.start) if s.start else "a random head",
        "objective": s.objective,
        "loss": s.loss,
        "steps": next(check["step"] for check in run.progress.checks if check["tau"] == best),
        "steps_in_all": run.trainer.steps,
        "tokens": run.progress.tokens,
        "training_seconds": round(run.progress.seconds, 1),
        "prompts": str(s.prompts),
        "prompts_sha256": prompts.digest,
        "prompts_used": len(prompts.tokens),
        "prompts_limit": s.limit,
        "responses": len(responses),
        "response_tokens": sum(len(r.tokens) for r in responses),
        "temperature": s.sampling.temperature,
        "top_p": s.sampling.top_p,
        "top_k": s.sampling.top_k,
        "seed": s.seed,
        "tau_sim": round(best, 4),
        "acceptance": [round(a / b, 4) if b else 0.0 for a, b in zip(accepted, before, strict=True)],
        "date": time.strftime("%Y-%m-%d"),
    }
    return save_drafter(run.trainer.model, s.out, facts, policy=s.model)
