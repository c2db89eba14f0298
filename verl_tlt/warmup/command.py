"""`verl-tlt warmup`: a drafter for a policy, from the policy's own responses to a file of prompts.

Four stages: vLLM answers the prompts; the policy's hidden states at every position of the answers are captured as
they are needed; the drafter trains on them until its budget is used up; it is judged on held-out prompts and saved.
Work in progress is in `OUT.warmup` beside `OUT`; the same command goes on after a kill; `OUT` appears whole.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verl_tlt.config import OBJECTIVES
from verl_tlt.drafter import (
    DrafterTrainer,
    build_drafter,
    check_drafter,
    load_drafter,
    load_own_head,
    most_frequent,
    policy_shape,
    save_drafter,
)
from verl_tlt.drafter.check import drafter_folder, drafter_method
from verl_tlt.drafter.evaluate import combined_score
from verl_tlt.drafter.mtp_tensors import head_files
from verl_tlt.drafter.policy import MTP, DrafterError, check_aux_layers, draft_vocab_size, read_json, unsupported
from verl_tlt.drafter.rehearsal import rehearse
from verl_tlt.ownership import check_writable, other_owner
from verl_tlt.warmup.engine import GenerationJob, Response, as_texts, find_device, generate
from verl_tlt.warmup.options import WarmupOptions
from verl_tlt.warmup.progress import Lines
from verl_tlt.warmup.prompts import Prompts, load_tokenizer, read_prompts
from verl_tlt.warmup.train import TrainingRun, policy_library

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

STATE = "state.safetensors"
"""In the working directory: the training run's."""
MIN_RESPONSE = 8
"""Mean tokens of a response below which there is nothing to draft."""
_MAY_CHANGE = {
    "out", "device", "cache_gb", "tensor_parallel", "epochs", "max_steps", "max_tokens", "max_minutes",
}  # fmt: skip
"""Options that may differ when a run goes on."""


def warmup(options: WarmupOptions, console: Console) -> Path:
    """Run all stages and return the drafter's directory; a `DrafterError` leaves nothing under the final name."""
    _check(options)
    prompts, device = read(options), find_device(options.device)
    begin(options, prompts)
    columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        responses = _responses(options, prompts, device, bars)
        run = _prepare(options, prompts, responses, device)
        _train(run, bars)
    directory = _save(options, prompts, responses, run)
    shutil.rmtree(options.work)
    console.print(
        f"Wrote {directory}: accept length {max(run.taus):.2f} on held-out prompts, drafting {options.draft_length}."
        f"\nNext: verl-tlt evaluate {directory} --model {options.model}",
        highlight=False,
        soft_wrap=True,
    )
    return directory


def _check(options: WarmupOptions) -> None:
    """Raise a `DrafterError` for the first option that can be known to be wrong before any work."""
    shape = policy_shape(options.model)
    own = options.method == MTP
    if not own and (why := unsupported(shape.model_type, shape.architectures)):
        raise DrafterError(f"--model {options.model} is a {shape.model_type} model; {why}.")
    if options.out.exists():
        raise DrafterError(f"--out {options.out} exists; give another name, or remove it.")
    check_writable(options.out.parent, "the directory of --out")
    if options.objective not in OBJECTIVES:
        raise DrafterError(f"--objective must be {', '.join(OBJECTIVES)}, not {options.objective!r}.")
    find_device(options.device)
    if (layers := _parse_layers(options.aux_layers)) is not None:
        check_aux_layers(layers, shape.num_layers, "--aux-layers")
    draft_vocab_size(options.draft_vocab, shape.vocab_size, "--draft-vocab")
    if options.method not in (MTP, "eagle3"):
        raise DrafterError(f"--method must be eagle3 or mtp, not {options.method!r}.")
    shaped = (options.aux_layers, options.draft_vocab, options.intermediate_size) != (None, None, None)
    if shaped and (own or options.drafter is not None):
        raise DrafterError(
            f"{'--method mtp' if own else '--drafter'} brings its own shape: leave out --aux-layers, --draft-vocab and "
            "--intermediate-size."
        )
    rehearse(options.model, options.method)
    if options.drafter is not None:
        check_drafter(options.drafter, options.model)
        if (kind := drafter_method(drafter_folder(options.drafter))) != options.method:
            raise DrafterError(f"--drafter {options.drafter} is for --method {kind}, not {options.method}.")
    elif own:
        head_files(options.model, shape)


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Text like "2,18,33" as numbers."""
    try:
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise DrafterError(f"--aux-layers must be numbers like 2,18,33, not {text!r}.") from None


def read(options: WarmupOptions) -> Prompts:
    """The prompts that leave room for a response."""
    longest = policy_shape(options.model).max_position_embeddings - options.response_length
    if longest < 1:
        raise DrafterError(
            f"--response-length {options.response_length} leaves no room for a prompt in the policy's "
            f"max_position_embeddings={longest + options.response_length}."
        )
    return read_prompts([options.prompts], load_tokenizer(options.model), longest, options.limit)


def begin(options: WarmupOptions, prompts: Prompts) -> None:
    """Make the working directory; refuse one of a run with other options, or of another user."""
    work, file = options.work, options.work / "run.json"
    for name in (file.name, STATE, "responses"):
        if reason := other_owner(work / name):
            raise DrafterError(f"{work} may be another user's work: {reason}; give an --out in a place of your own.")
    given = json.loads(json.dumps(asdict(options), default=str))
    wanted = {key: value for key, value in given.items() if key not in _MAY_CHANGE}
    wanted["prompts_sha256"] = prompts.digest
    if not file.is_file():
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted))
        return
    begun = read_json(file)
    if key := next((key for key in wanted if begun.get(key) != wanted[key]), None):
        raise DrafterError(
            f"{work} belongs to a run with {key}={begun.get(key)!r}, not {wanted[key]!r}; remove it to start again."
        )


def _responses(options: WarmupOptions, prompts: Prompts, device: str, bars: Progress) -> list[Response]:
    task = bars.add_task("generate", total=1, note="starting vLLM")
    job = GenerationJob(
        model=str(options.model),
        prompts=[list(prompt) for prompt in prompts.tokens],
        samples=options.samples,
        sampling=options.sampling(),
        device=device,
        tensor_parallel=options.tensor_parallel,
    )

    began = time.monotonic()
    lines = Lines(began)

    def tell(done: int, total: int) -> None:
        note, now = f"{done} of {total} responses", time.monotonic()
        if done:
            bars.update(task, completed=done, total=total, note=note)
        if not bars.console.is_terminal and lines.due(done / total, now):
            bars.console.print(f"generate: {note} after {now - began:.0f} s", highlight=False)

    responses, _ = generate(job, options.work / "responses", tell)
    mean = sum(len(r.tokens) for r in responses) / len(responses)
    if mean < MIN_RESPONSE:
        raise DrafterError(
            f"The policy's responses have {mean:.1f} tokens on average, too few to learn from: is --prompts "
            f"{options.prompts} what this policy is asked in training?"
        )
    return responses


def _prepare(options: WarmupOptions, prompts: Prompts, responses: list[Response], device: str) -> TrainingRun:
    """Drafter, policy and texts as a training run, where it was left if it was begun before."""
    drafter, texts = _drafter(options, responses, device), as_texts(prompts.tokens, responses)
    library, head = policy_library(drafter, options, texts, device, int(options.cache_gb * 1e9))
    passes, rate = OBJECTIVES[options.objective], options.learning_rate
    run = TrainingRun(
        DrafterTrainer(drafter, learning_rate=rate, ttt_steps=passes, loss=options.loss),
        library,
        train=[i for i, r in enumerate(responses) if r.prompt not in prompts.held_out],
        judged=[i for i, r in enumerate(responses) if r.prompt in prompts.held_out],
        options=options,
        state_file=options.work / STATE,
        whole_head=head,
    )
    run.resume()
    return run


def _drafter(options: WarmupOptions, responses: list[Response], device: str) -> Eagle3DraftModel:
    if options.drafter is not None:
        return load_drafter(options.drafter, options.model, device=device)
    if options.method == MTP:
        return load_own_head(options.model, options.model, device=device)
    draft_ids, whole = None, policy_shape(options.model).vocab_size
    if (size := draft_vocab_size(options.draft_vocab, whole, "--draft-vocab")) < whole:
        said = torch.tensor([t for r in responses for t in r.tokens])
        draft_ids = most_frequent(torch.bincount(said, minlength=whole), size)
    return build_drafter(
        options.model,
        aux_layers=_parse_layers(options.aux_layers),
        intermediate_size=options.intermediate_size,
        seed=options.seed,
        device=device,
        draft_ids=draft_ids,
    )


def _train(run: TrainingRun, bars: Progress) -> None:
    task = bars.add_task("train", total=1.0, note="")
    checks = len(run.taus)

    def tell(run: TrainingRun) -> None:
        nonlocal checks
        p = run.progress
        note = f"step {run.trainer.steps}, {p.tokens} tokens, loss {p.loss:.3f}, accept length {run.taus[-1]:.2f}"
        bars.update(task, completed=run.spent, note=note)
        if len(run.taus) > checks:
            checks = len(run.taus)
            bars.console.print(f"{100 * run.spent:3.0f} %  {note}", highlight=False)

    run(tell)


def _save(options: WarmupOptions, prompts: Prompts, responses: list[Response], run: TrainingRun) -> Path:
    if not run.progress.tokens:
        raise DrafterError(f"{options.out} was not written: the drafter did not learn from a single token.")
    best, score = max(run.taus), combined_score(run.score())
    facts: dict[str, Any] = {
        "policy": str(options.model),
        "started from": str(options.drafter or ("its release" if options.method == MTP else "a random head")),
        **{name: getattr(options, name) for name in ("objective", "loss", "temperature", "top_p", "top_k", "seed")},
        "steps": next(check["step"] for check in run.progress.checks if check["tau"] == best),
        "steps_in_all": run.trainer.steps,
        "tokens": run.progress.tokens,
        "training_seconds": round(run.progress.seconds, 1),
        "prompts": str(options.prompts),
        "prompts_sha256": prompts.digest,
        "prompts_used": len(prompts.tokens),
        "prompts_limit": options.limit,
        "responses": len(responses),
        "response_tokens": sum(len(r.tokens) for r in responses),
        "tau_sim": round(best, 4),
        "acceptance": [round(float(a), 4) for a in score.accept],
        "date": time.strftime("%Y-%m-%d"),
    }
    return save_drafter(run.trainer.model, options.out, facts, policy=options.model)
