"""`verl-tlt warmup`: a drafter for a policy, from the policy's own responses to a file of prompts.

Four stages: vLLM answers the prompts; the policy's hidden states at every position of the answers are captured as
they are needed; the drafter trains on them until its budget is used up; it is judged on held-out prompts and saved.
Work in progress is in `OUT.warmup` beside `OUT`; the same command goes on after a kill; `OUT` appears whole.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from verl_tlt.checks.recipe import quoted
from verl_tlt.commands.console import say
from verl_tlt.commands.doctor.standalone_engine import fetch_policy
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.lock import take_lock
from verl_tlt.commands.options import UNLIMITED, WarmupOptions
from verl_tlt.commands.serve import serve_command
from verl_tlt.commands.warmup import engine
from verl_tlt.commands.warmup.card import model_card
from verl_tlt.commands.warmup.prompts import Prompts, read_prompts
from verl_tlt.commands.warmup.run import ends_of_responses
from verl_tlt.commands.warmup.train import PolicyTexts, TrainingRun
from verl_tlt.config import OBJECTIVES
from verl_tlt.drafter.build import build_drafter, most_frequent
from verl_tlt.drafter.capture import check_loadable
from verl_tlt.drafter.check import check_drafter, place_for
from verl_tlt.drafter.checkpoint import load_drafter, load_own_head, save_drafter
from verl_tlt.drafter.model_files import first_line
from verl_tlt.drafter.mtp_tensors import head_files
from verl_tlt.drafter.policy import MTP, check_aux_layers, draft_vocab_size, policy_shape, unsupported
from verl_tlt.drafter.train import DrafterTrainer
from verl_tlt.drafter.verifier import check_policy_files
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import check_writable, replacing
from verl_tlt.files.json_files import read_json

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

STATE = "state.safetensors"
"""File of the training run's state, in the working directory."""
MIN_RESPONSE = 8
"""Mean tokens of a response below which there is nothing to draft."""
_OF_RESPONSES = ("model", "response_length", "temperature", "top_p", "top_k", "samples", "seed")
"""Options that responses depend on: with other values earlier responses are of no use."""
_OF_TRAINING = (
    "draft_length", "method", "drafter", "aux_layers", "intermediate_size", "draft_vocab", "objective", "batch_tokens",
    "learning_rate",
)  # fmt: skip
"""Options that training alone depends on: with other values it begins anew, on the same responses."""


def warmup(options: WarmupOptions, console: Console) -> Path:
    """Run all stages and return the drafter's directory; a `DrafterError` leaves nothing under the final name."""
    _check(options)
    prompts = read_prompts(options, options.work / "images", options.limit)
    device = engine.find_device()
    fetch_policy(options.model)
    if prompts.with_media:
        say(console, f"{prompts.with_media} prompts with videos or sound are left out.")
    if prompts.dated:
        say(console, prompts.dated)
    with take_lock(options.work / "lock", f"Another warm-up is writing to {options.work}; give another --out."):
        if notice := begin(options, prompts):
            say(console, notice)
        try:
            with interruptible(), engine.make_bars(console) as bars:
                responses = _responses(options, prompts, engine.Stage(bars, "generate", "starting vLLM"))
                run = _prepare(options, prompts, responses, device, engine.Stage(bars, "train", "loading the policy"))
                run()
        except torch.OutOfMemoryError as error:
            less = f"give a smaller --batch-tokens than {options.batch_tokens}, or more GPUs; the responses are kept"
            whole = "If that is not enough, give another --out and shorter responses: held-out ones are scored whole"
            raise DrafterError(f"The GPU has too little memory: {less}. {whole}. ({first_line(error)})") from error
        except KeyboardInterrupt:
            say(console, f"Interrupted: the same command goes on with what is in {options.work}.")
            raise
        directory = _save(options, prompts, responses, run)
    shutil.rmtree(options.work, ignore_errors=True)  # of NFS a folder whose lock is open cannot be removed
    say(console, conclusion(options, directory, max(run.taus)))
    return directory


def conclusion(options: WarmupOptions, directory: Path, accept_length: float) -> str:
    """What was written, and what to do with it."""
    method = "" if options.method == "eagle3" else f" tlt.drafter.method={options.method}"
    path = str(directory.absolute())
    path = path if re.fullmatch(r"[\w./+-]+", path, re.ASCII) else quoted(path)
    lines = [
        f"Wrote {directory}: accept length {accept_length:.2f} on held-out prompts, drafting {options.draft_length}.",
        f"In your recipe: +trainer.plugin=tlt {shlex.quote(f'tlt.drafter.path={path}')}{method}",
        f"In stock vLLM:  {serve_command(options.method, str(directory), str(options.model))}",
        f"What it is worth: verl-tlt evaluate {shlex.quote(str(directory))}, with the same recipe, model and prompts",
    ]
    return "\n".join(lines)


def _check(options: WarmupOptions) -> None:
    """Raise a `DrafterError` for the first option that can be known to be wrong before any work."""
    shape = policy_shape(options.model)
    own_head = options.method == MTP
    if not own_head and (why := unsupported(shape.model_type, shape.architectures, shape.latent)):
        raise DrafterError(f"--model {options.model} is a {shape.model_type} model; {why}.")
    check_writable(place_for(options.out, "--out").parent, "the directory of --out")
    if min(options.epochs, options.max_steps, options.max_minutes) == UNLIMITED:
        raise DrafterError("--epochs inf needs --max-steps or --max-minutes: nothing else would end the training.")
    if options.objective not in OBJECTIVES:
        raise DrafterError(f"--objective must be {', '.join(OBJECTIVES)}, not {options.objective!r}.")
    engine.find_device(options.tensor_parallel)
    layers = _parse_layers(options.aux_layers)
    if layers is not None:
        check_aux_layers(layers, shape.num_layers, "--aux-layers")
    draft_vocab_size(options.draft_vocab, shape.vocab_size, "--draft-vocab")
    if options.method not in (MTP, "eagle3"):
        raise DrafterError(f"--method must be eagle3 or mtp, not {options.method!r}.")
    shape_options = (options.aux_layers, options.draft_vocab, options.intermediate_size)
    shape_is_given = any(option is not None for option in shape_options)
    if shape_is_given and (own_head or options.drafter is not None):
        leave_out = "leave out --aux-layers, --draft-vocab and --intermediate-size"
        raise DrafterError(f"{'--method mtp' if own_head else '--drafter'} brings its own shape: {leave_out}.")
    check_loadable(options.model)
    check_policy_files(options.model, options.method)
    if options.drafter is not None:
        kind = check_drafter(options.drafter, options.model).method
        if kind != options.method:
            raise DrafterError(f"--drafter {options.drafter} is for --method {kind}, not {options.method}.")
    elif own_head:
        head_files(options.model, shape)


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise DrafterError(f"--aux-layers must be numbers like 2,18,33, not {text!r}.") from None


def begin(options: WarmupOptions, prompts: Prompts) -> str | None:
    """Make the working directory, or go on with the one that is there.

    Raises a `DrafterError` if its responses were made with other options. If only options of the training differ, its
    training begins anew, and the returned sentence says so.
    """
    work = options.work
    file = work / "run.json"
    given = json.loads(json.dumps(asdict(options), default=str))
    wanted = {key: given[key] for key in (*_OF_RESPONSES, *_OF_TRAINING)}
    wanted |= {"prompts": prompts.digest, **ends_of_responses(options)}
    begun = read_json(file) if file.is_file() else wanted
    changed = [key for key in wanted if begun.get(key, wanted[key]) != wanted[key]]  # an older release noted less

    def difference(key: str) -> str:
        return f"{key}={begun.get(key)!r}, not {wanted[key]!r}"

    for key in changed:
        if key not in _OF_TRAINING:
            raise DrafterError(f"{work} belongs to a run with {difference(key)}; remove it to start again.")
    work.mkdir(parents=True, exist_ok=True)
    if changed:
        (work / STATE).unlink(missing_ok=True)
    with replacing(file) as stream:
        stream.write(json.dumps(wanted).encode())
    if not changed:
        return None
    return f"{work} was begun with {difference(changed[0])}: its responses are kept, and training begins anew."


def _responses(options: WarmupOptions, prompts: Prompts, stage: engine.Stage) -> list[engine.Response]:
    count, longest = len(prompts.all), f"of up to {options.response_length} tokens"
    stage.say(f"{count} prompts x {options.samples} samples = {count * options.samples} responses {longest}")
    job = engine.generation_job(options, prompts.all, samples=options.samples)
    responses, _ = engine.generate(job, options.work / "responses", stage)
    mean = sum(len(r.tokens) for r in responses) / len(responses)
    if mean < MIN_RESPONSE:
        few = f"The policy's responses have {mean:.1f} tokens on average, too few to learn from"
        given = " ".join(map(str, options.prompts))
        raise DrafterError(f"{few}: is --prompts {given} what this policy is asked in training?")
    return responses


def _prepare(
    options: WarmupOptions, prompts: Prompts, responses: list[engine.Response], device: str, stage: engine.Stage
) -> TrainingRun:
    drafter = _drafter(options, prompts, responses, device)
    texts = engine.as_texts(prompts.all, responses)
    passes = OBJECTIVES[options.objective]
    held_out = [i for i, r in enumerate(responses) if r.prompt in prompts.held_out]
    return TrainingRun(
        DrafterTrainer(drafter, learning_rate=options.learning_rate, ttt_steps=passes),
        PolicyTexts(drafter, options, texts, device, int(options.cache_gb * 1e9)),
        train=[i for i, r in enumerate(responses) if r.prompt not in prompts.held_out],
        judged=sorted(held_out, key=lambda i: responses[i].sample),  # every prompt before any a second time
        options=options,
        state_file=options.work / STATE,
        stage=stage,
    )


def _drafter(
    options: WarmupOptions, prompts: Prompts, responses: list[engine.Response], device: str
) -> Eagle3DraftModel:
    if options.drafter is not None:
        longest = engine.context_of(options, prompts.all) + options.draft_length
        return load_drafter(options.drafter, options.model, min_context=longest, device=device)
    if options.method == MTP:
        return load_own_head(options.model, options.model, device=device)
    draft_ids = None
    whole = policy_shape(options.model).vocab_size
    size = draft_vocab_size(options.draft_vocab, whole, "--draft-vocab")
    if size < whole:
        generated = torch.tensor([t for r in responses for t in r.tokens])
        draft_ids = most_frequent(torch.bincount(generated, minlength=whole), size)
    return build_drafter(
        options.model,
        aux_layers=_parse_layers(options.aux_layers),
        intermediate_size=options.intermediate_size,
        seed=options.seed,
        device=device,
        draft_ids=draft_ids,
    )


def _save(options: WarmupOptions, prompts: Prompts, responses: list[engine.Response], run: TrainingRun) -> Path:
    if not run.progress.tokens:
        raise DrafterError(f"{options.out} was not written: the drafter did not learn from a single token.")
    best = max(run.taus)
    facts: dict[str, Any] = {
        "policy": str(options.model),
        "started from": str(options.drafter or ("its release" if options.method == MTP else "a random head")),
        **{name: getattr(options, name) for name in ("objective", "temperature", "top_p", "top_k", "seed")},
        "steps": run.progress.checks[run.taus.index(best)]["step"],
        "steps_in_all": run.trainer.steps,
        "tokens": run.progress.tokens,
        "training_seconds": round(run.progress.seconds, 1),
        "prompts": [file.name for file in options.prompts],
        "prompts_sha256": prompts.files_digest,
        "prompts_digest": prompts.digest,
        "prompts_used": len(prompts.all),
        "prompts_limit": options.limit,
        "responses": len(responses),
        "response_tokens": sum(len(r.tokens) for r in responses),
        "tau_sim": round(best, 4),
        "acceptance": [round(a, 4) for a in run.progress.acceptance],
        "checks": run.progress.checks,
        "date": time.strftime("%Y-%m-%d"),
    }
    directory = save_drafter(run.trainer.model, options.out, facts, policy=options.model)
    shown = {**facts, "accept length": facts["tau_sim"], "draft positions": options.draft_length}
    card = model_card(options.method, options.out.name, options.model, shown)
    (directory / "README.md").write_text(card, encoding="utf-8")
    return directory
