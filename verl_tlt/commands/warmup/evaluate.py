"""`verl-tlt evaluate`: the accept length of a drafter, predicted from recorded text and counted by vLLM.

vLLM answers prompts with the drafter at work and counts what it accepts. The same answers are then scored without an
engine (`verl_tlt.drafter.acceptance`). The two numbers come from the same text, so only the randomness of speculative
sampling makes them differ. A larger difference, of 5 % beyond chance, means that one of the two feeds the drafter
something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from verl_tlt.commands.child_engine import scratch
from verl_tlt.commands.console import say
from verl_tlt.commands.doctor.standalone_engine import fetch_policy
from verl_tlt.commands.options import EvaluateOptions
from verl_tlt.commands.warmup import engine
from verl_tlt.commands.warmup.prompts import Prompt, read_prompts
from verl_tlt.commands.warmup.train import PolicyTexts
from verl_tlt.drafter.capture import check_loadable
from verl_tlt.drafter.checkpoint import load_drafter, provenance, stage, to_drafter_file
from verl_tlt.drafter.evaluate import DraftCounts
from verl_tlt.drafter.model_files import Model, first_line, folder
from verl_tlt.drafter.mtp_write_back import write_back
from verl_tlt.drafter.policy import MTP
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG
from verl_tlt.server.engine_arguments import speculative_config

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

AGREE = 0.05
"""Largest difference between predicted and served accept length that counts as agreement, relative, beyond chance."""
BATCH_TOKENS = 1024
"""Tokens scored at once."""


@dataclass(frozen=True)
class Verdict:
    """Acceptance in the same responses, as predicted (`simulated`) and as vLLM counted it (`served`)."""

    simulated: DraftCounts
    served: DraftCounts
    sequences: int
    tokens: int

    @property
    def difference(self) -> float:
        return self.simulated.accept_length / self.served.accept_length - 1.0

    @property
    def chance(self) -> float:
        """Two standard errors of the served accept length, relative to it; 0 without a draft."""
        drafts, accepted = self.served.drafts, self.served.accepted
        if not drafts:
            return 0.0
        ranks = np.arange(1, len(accepted) + 1)  # of a count N: E[N^2] = sum over k of (2k - 1) P(N >= k)
        variance = ((2 * ranks - 1) * accepted).sum() / drafts - (accepted.sum() / drafts) ** 2
        return 2.0 * float(np.sqrt(max(variance, 0.0) / drafts)) / self.served.accept_length

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= AGREE + self.chance


def evaluate(options: EvaluateOptions, console: Console) -> Verdict:
    check_loadable(options.model)  # a policy that is not there is named before its prompts
    device = engine.find_device(options.tensor_parallel)
    with scratch() as folder:
        prompts = choose_prompts(options, folder / "images")
        fetch_policy(options.model)
        # Staged as a run serves it: what else is in the file does not reach vLLM, which casts to the policy's dtype.
        drafter = _load(options, prompts)
        method = drafter.config.speculators_model_type
        staged = folder / "drafter"
        stage(*to_drafter_file(drafter, "float32"), staged)
        served_by = options
        if method == MTP:
            served_by = replace(options, model=linked(options.model, folder / "policy"))
            write_back(staged, served_by.model)
        drafting = speculative_config(str(staged), options.draft_length, method=method)
        job = engine.generation_job(served_by, prompts, drafting=drafting)
        with engine.make_bars(console) as bars:
            responses, served = engine.generate(job, folder, engine.Stage(bars, "serve", "starting vLLM"))
            assert served is not None
            scored = engine.Stage(bars, "score", "loading the policy")
            drafter = _load(options, prompts, device)
            texts = engine.as_texts(prompts, responses)

            def tell(done: int, total: int) -> None:
                scored.tell(done / total, f"{done} of {total} tokens")

            try:
                library = PolicyTexts(drafter, options, texts, device, max_bytes=0)
                simulated = library.score(drafter, range(len(texts)), BATCH_TOKENS, tell)
            except torch.OutOfMemoryError as error:
                less = "take more GPUs, or shorter responses, which are scored whole"
                raise DrafterError(f"The GPU has too little memory: {less}. ({first_line(error)})") from error
    return Verdict(simulated, served, len(responses), sum(len(r.tokens) for r in responses))


def linked(policy: Model, directory: Path) -> Path:
    """Make a directory of links to a policy's files, all of them local; changing it leaves the policy as it is."""
    directory.mkdir()
    for path in folder(policy, (CONFIG,)).resolve().iterdir():
        if path.is_file():
            (directory / path.name).symlink_to(path)
    return directory


def choose_prompts(options: EvaluateOptions, images: Path) -> list[Prompt]:
    """The prompts to answer; of those that the drafter was warmed up with, only those held out."""
    facts = provenance(options.drafter)
    if known := facts.get("prompts_digest"):
        own = read_prompts(options, images, facts.get("prompts_limit"), least=1)
        if own.digest == known:
            return [own.all[i] for i in sorted(own.held_out)][: options.limit]
        if own.files_digest == facts.get("prompts_sha256"):
            if own.dated:
                raise DrafterError(
                    f"{options.drafter} was warmed up with these files on another day, and the chat template writes "
                    "the day into each prompt: give other --prompts."
                )
            raise DrafterError(
                f"{options.drafter} was warmed up with these files, in the form that another run gives them: give the "
                "command of that run after --, or other --prompts."
            )
    return list(read_prompts(options, images, options.limit, least=1).all)


def _load(options: EvaluateOptions, prompts: Sequence[Prompt], device: str = "cpu") -> Eagle3DraftModel:
    """The drafter, with positions for the longest sequence that is served, as a run loads it."""
    longest = engine.context_of(options, prompts) + options.draft_length
    return load_drafter(options.drafter, options.model, min_context=longest, device=device)


def report(verdict: Verdict, console: Console) -> None:
    table = Table(title=f"{verdict.sequences} responses, {verdict.tokens} tokens, {verdict.served.drafts} drafts")
    for column in ("", "simulated", "served by vLLM"):
        table.add_column(column, justify="left" if not column else "right")
    for k, (a, b) in enumerate(zip(verdict.simulated.accept, verdict.served.accept, strict=True)):
        table.add_row(f"acceptance at position {k + 1}", f"{a:.3f}", f"{b:.3f}")
    table.add_row("accept length", f"{verdict.simulated.accept_length:.3f}", f"{verdict.served.accept_length:.3f}")
    console.print(table)
    sentence = f"They differ by {100 * verdict.difference:+.1f} %"
    most = f"{100 * AGREE:.0f} % plus chance ({100 * verdict.chance:.1f} %)"
    if verdict.agrees:
        say(console, f"{sentence}: within {most}.")
    else:
        cause = "vLLM gives this drafter other inputs than its training did. Use another drafter."
        say(console, f"{sentence}, more than {most}: {cause}", style="red")
