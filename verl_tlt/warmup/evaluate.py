"""`verl-tlt evaluate`: what a drafter is worth, predicted from recorded text and counted by stock vLLM.

vLLM answers prompts with the drafter at work and counts what it accepts. The same answers are then scored without an
engine (`verl_tlt.drafter.acceptance`). The two numbers come from the same text, so they differ by the coin tosses of
speculative sampling alone; more than 5 % apart means that one of the two feeds the drafter something else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from verl_tlt.drafter.check import check_drafter, check_owner, drafter_folder
from verl_tlt.drafter.checkpoint import provenance
from verl_tlt.drafter.policy import DrafterError
from verl_tlt.warmup.engine import GenerationJob, Response, SamplingSettings, Served, generate
from verl_tlt.warmup.prompts import Prompts, load_tokenizer, read_prompts

AGREE = 0.05
"""Largest relative difference between predicted and served accept length that counts as agreement."""


@dataclass(frozen=True)
class Verdict:
    """Prediction and count side by side."""

    simulated: float
    """tau_sim: tokens per draft."""
    simulated_accept: tuple[float, ...]
    """By position, given that the positions before were accepted."""
    served: Served
    sequences: int
    tokens: int

    @property
    def difference(self) -> float:
        """Relative, of the prediction against what was served."""
        return self.simulated / self.served.accept_length - 1.0

    @property
    def agrees(self) -> bool:
        """Whether the two are within `AGREE`."""
        return abs(self.difference) <= AGREE


def evaluate(
    drafter: Path,
    model: Path,
    prompts: Path | None,
    sampling: SamplingSettings,
    *,
    device: str,
    draft_length: int = 3,
    limit: int = 64,
    tensor_parallel: int = 1,
    console: Console,
) -> Verdict:
    """Serve, count, and score the same answers.

    Args:
        drafter: its directory, or its name on the hub.
        model: the policy's, likewise.
        prompts: a file as `read_prompts` takes it; None: the one the drafter was warmed up with. Of that file only
            prompts that were held out are used.
        sampling: how answers are sampled.
        device: "cpu" or "cuda".
        draft_length: K.
        limit: most prompts.
        tensor_parallel: GPUs of the engine.
        console: for progress.

    Raises:
        TLTError: the drafter or the prompts cannot be used, or vLLM ended early.
    """
    check_owner(drafter)
    check_drafter(drafter, model)
    chosen = _prompts(drafter, model, prompts, sampling.max_tokens, limit)
    job = GenerationJob(
        model=str(model),
        prompts=[list(tokens) for tokens in chosen],
        samples=1,
        sampling=sampling,
        device=device,
        drafter=str(drafter_folder(drafter)),
        draft_length=draft_length,
        tensor_parallel=tensor_parallel,
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, tempfile.TemporaryDirectory() as scratch:
        task = bar.add_task("starting vLLM", total=None)
        responses, served = generate(
            job,
            Path(scratch),
            lambda done, total: bar.update(task, description=f"serving: {done} of {total} responses"),
        )
        assert served is not None
        bar.update(task, description="scoring the same responses")
        return score(drafter, model, chosen, responses, served, sampling, device, draft_length)


def score(
    drafter: Path,
    model: Path,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    served: Served,
    sampling: SamplingSettings,
    device: str,
    draft_length: int,
) -> Verdict:
    """Predict acceptance on what vLLM answered; arguments as `evaluate`'s, `prompts` as token ids."""
    import transformers

    from verl_tlt.drafter import (
        Library,
        PolicyStates,
        Text,
        VerifierWeights,
        accept_length,
        acceptance,
        load_drafter,
        load_policy,
        refresh_verifier_weights,
    )

    transformers.utils.logging.disable_progress_bar()  # there is one already
    texts = [Text((*prompts[r.prompt], *r.tokens), len(prompts[r.prompt])) for r in responses]
    draft_model = load_drafter(drafter, model, device=device)
    parts = VerifierWeights.from_policy_dir(model)
    refresh_verifier_weights(draft_model, parts)
    library = Library(PolicyStates(load_policy(model, device), draft_model.target_layer_ids), texts, max_bytes=0)
    settings = {k: v for k, v in asdict(sampling).items() if k in ("temperature", "top_p", "top_k")}
    head = parts.lm_head.to(device) if draft_model.use_draft_vocab else None
    scores = []
    for number in range(len(texts)):
        scores += acceptance(draft_model, library.get([number]), max_draft=draft_length, lm_head=head, **settings)
    accepted = [sum(float(s.accepted[k]) for s in scores) for k in range(draft_length)]
    before = [sum(s.drafts for s in scores), *accepted[:-1]]
    return Verdict(
        simulated=accept_length(scores),
        simulated_accept=tuple(a / b if b else 0.0 for a, b in zip(accepted, before, strict=True)),
        served=served,
        sequences=len(responses),
        tokens=sum(len(r.tokens) for r in responses),
    )


def report(verdict: Verdict, console: Console) -> None:
    """Both numbers, by position and together."""
    table = Table(title=f"{verdict.sequences} responses, {verdict.tokens} tokens, {verdict.served.drafts} drafts")
    for column in ("", "simulated", "served by vLLM"):
        table.add_column(column, justify="left" if not column else "right")
    for k, (a, b) in enumerate(zip(verdict.simulated_accept, verdict.served.accept, strict=True)):
        table.add_row(f"acceptance at position {k + 1}", f"{a:.3f}", f"{b:.3f}")
    table.add_row("accept length", f"{verdict.simulated:.3f}", f"{verdict.served.accept_length:.3f}")
    console.print(table)
    sentence = f"They differ by {100 * verdict.difference:+.1f} %"
    if verdict.agrees:
        console.print(f"{sentence}: within {100 * AGREE:.0f} %.", highlight=False)
    else:
        console.print(f"{sentence}, more than {100 * AGREE:.0f} %: see docs/drafter.md.", style="red", highlight=False)


def _prompts(drafter: Path, model: Path, file: Path | None, response: int, limit: int) -> list[tuple[int, ...]]:
    from verl_tlt.drafter import policy_shape

    facts = provenance(drafter)
    if file is None:
        if "prompts" not in facts:
            raise DrafterError(f"{drafter} does not say which prompts it was warmed up with; give --prompts.")
        file = Path(facts["prompts"])
    longest = policy_shape(model).max_position_embeddings - response
    found: Prompts = read_prompts(file, load_tokenizer(model), longest, facts.get("prompts_limit"), least=1)
    held_out = facts.get("prompts_sha256") == found.digest
    chosen = [p for i, p in enumerate(found.tokens) if not held_out or i in found.held_out]
    return chosen[:limit]
