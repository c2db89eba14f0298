"""`verl-tlt advise`: reads a recipe and what a run of it showed, simulates, judges, and prints what decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_tlt.advise.hardware import GPUS, find_shape, shape_of_size
from verl_tlt.advise.judge import Numbers, Verdict, judge, never_trained
from verl_tlt.advise.outlook import SETTINGS, Case, Outlook, accept_length, break_even, look_ahead, usable
from verl_tlt.advise.seen import Seen, read_metrics, read_run
from verl_tlt.config import TLTConfig
from verl_tlt.doctor.command import read_arguments
from verl_tlt.doctor.facts import read_settings
from verl_tlt.doctor.recipe import compose
from verl_tlt.doctor.workload import read_workload
from verl_tlt.errors import TLTError
from verl_tlt.speculation.graph_rules import LONGEST, LONGEST_WITHOUT_GRAPHS

BATCHES = (1, 8, 32, 128)
"""At which the break-even accept length is shown."""
DEFAULT_GPU = "H100"


@dataclass(frozen=True)
class Given:
    """What the user says besides the recipe."""

    gpu: str | None = None
    parameters: float | None = None
    """Of the policy, in billions."""
    response_length: float | None = None
    """Mean, in tokens."""
    reward_s: float = 0.0
    acceptance: tuple[float, ...] = ()
    trace: Path | None = None
    metrics: Path | None = None
    seed: int = 0


def parse_acceptance(text: str | None) -> tuple[float, ...]:
    """`0.8,0.75,0.7` as numbers.

    Raises:
        TLTError: one is no number in 0..1.
    """
    try:
        values = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        values = (-1.0,)
    if not all(0.0 <= a <= 1.0 for a in values):
        raise TLTError(f"--acceptance takes numbers in 0..1 with commas between, one for each position, not {text!r}.")
    return values


def read_case(arguments: Sequence[str], config_name: str, given: Given) -> tuple[Case, list[tuple[str, str]]]:
    """The recipe, the run and what was said, as one case; and what had to be assumed for it.

    Raises:
        TLTError: something cannot be read, or contradicts something else.
    """
    if given.trace is not None and given.metrics is not None:
        raise TLTError("--trace and --metrics are two ways to show the same run: give one of them.")
    recipe = read_arguments(arguments, config_name)
    config = compose(recipe.overrides, recipe.config)
    settings, work = read_settings(config), read_workload(config)
    assumed = []
    if given.gpu is None:
        assumed.append(("GPU", f"{DEFAULT_GPU}; --gpu names another ({', '.join(sorted(GPUS))})"))
    elif given.gpu.upper() not in GPUS:
        raise TLTError(f"--gpu {given.gpu} is not one of {', '.join(sorted(GPUS))}.")
    if given.parameters is not None and not given.parameters > 0:
        raise TLTError(f"--parameters must be above 0 (billions), not {given.parameters:g}.")
    if given.parameters is not None:
        shape = shape_of_size(given.parameters * 1e9)
    else:
        shape, source = find_shape(work.policy)
        assumed.append(("policy's shape", f"{shape.parameters / 1e9:.1f}B parameters, from {source}"))
    arms = _arms(settings, work.eager)
    if len(arms) < 2:
        raise TLTError(f"tlt.speculation.arms={list(arms)} never drafts, so there is nothing to advise on.")
    seen: Seen | None = None
    if given.trace is not None:
        seen = read_run(given.trace)
    elif given.metrics is not None:
        seen = read_metrics(given.metrics)
    case = Case(
        work, shape, GPUS[(given.gpu or DEFAULT_GPU).upper()], arms, settings.spot.enable,
        settings.drafter.path is not None, seen, given.acceptance, given.response_length, given.reward_s, given.seed,
    )  # fmt: skip
    return case, assumed


def _arms(settings: TLTConfig, eager: bool) -> tuple[int, ...]:
    """Draft lengths of the policy; those with CUDA graphs, where the recipe does not say it."""
    s = settings.speculation
    if s.arms is not None:
        return tuple(s.arms)
    longest = s.max_draft_length or (LONGEST_WITHOUT_GRAPHS if eager else LONGEST)
    return tuple(k for k in range(longest + 1) if eager or k in (0, 1, 3, 7) or k == longest)


def numbers(case: Case, found: Outlook) -> Numbers:
    """What decides, measured where it was, simulated elsewhere."""
    seen, likely = case.seen, found.results["likely"]
    lengths = usable(found.costs["likely"], case.arms)
    k = max(k for k in lengths if k <= max(3, lengths[1]))
    context = _context(case, found)
    tail = likely.small_batch_share
    if seen is not None and (whole := sum(seen.seconds_by_batch.values())):
        tail = sum(s for b, s in seen.seconds_by_batch.items() if b < 32) / whole
    bubble = seen.bubble_s / case.work.replicas if seen is not None and seen.bubble_s is not None else None
    gen_s = seen.stock_gen_s if seen is not None else likely.stock_rollout_s
    waiting = (seen.tool_share or 0.0) if seen is not None else 0.0
    if case.work.multi_turn and seen is not None and seen.tool_share is None and seen.busy_share is not None:
        waiting = 1.0 - seen.busy_share
    spot = found.spot
    # A few simulated steps have luck of their own, by which a worse drafter may come out ahead.
    ratios = [result.rollout_ratio for result in found.results.values()]
    return Numbers(
        gen_s=gen_s,
        rest_s=found.rest_s,
        overhead_s=likely.overhead_s,
        rollout={"low": min(ratios), "likely": likely.rollout_ratio, "high": max(ratios)},
        tail_share=tail,
        bubble_s=likely.stock_bubble_share * gen_s if bubble is None else bubble,
        bubble_needed_s=spot.begin_s
        + spot.settle_s
        + (spot.least_tokens / spot.tokens_per_s if spot.tokens_per_s else 0),
        replicas=case.work.replicas,
        has_drafter=case.has_drafter or bool(seen is not None and seen.accept_length and seen.accept_length > 1.2),
        trains=case.spot,
        mode=case.work.mode,
        reward_s=max(case.reward_s, (seen.reward_s or 0.0) if seen is not None else 0.0),
        tool_share=waiting,
        response_mean=likely.tokens / max(case.work.requests, 1),
        tail_break_even=break_even(found.costs["likely"], (8,), (k,), context)[8][k],
        accept={name: accept_length(found.acceptance[name], k) for name in SETTINGS},
        measured=seen is not None,
    )


def _context(case: Case, found: Outlook) -> int:
    """Tokens of context of a request in the tail: a mean response, and its prompt."""
    return round(found.results["likely"].tokens / max(case.work.requests, 1)) + case.work.prompt // 4


def knobs(case: Case, n: Numbers) -> list[str]:
    """What to change, one sentence each."""
    work, said = case.work, []
    if not n.has_drafter:
        said.append("verl-tlt warmup, then tlt.drafter.path: a random head drafts nothing until bubbles trained it.")
    if case.spot and (why := never_trained(n)):
        said.append(f"Set tlt.spot.enable=false, or change what keeps sessions from beginning: {why}.")
    if n.accept is not None and n.accept["likely"] > 2.3 and case.arms[-1] <= 3 and n.tail_share > 0.3:
        said.append("Try tlt.speculation.max_draft_length=7: small batches bear longer drafts.")
    if work.refills:
        said.append("algorithm.filter_groups.enable=True keeps replicas in until the batch is complete: only the last "
                    "round has a bubble.")  # fmt: skip
    if work.response <= 512:
        said.append("data.max_response_length is short: acceptance and bubbles both grow with responses.")
    said.append("tlt.speculation.control_every=20 measures in the run what TLT saves.")
    return said


def advise(arguments: Sequence[str], config_name: str, given: Given, console: Console) -> Verdict:
    """Print the advice; returns the answer."""
    case, assumed = read_case(arguments, config_name, given)
    found = look_ahead(case)
    n = numbers(case, found)
    verdict = judge(n)
    _print(console, case, replace_assumed(found, assumed), n, verdict)
    return verdict


def replace_assumed(found: Outlook, first: Sequence[tuple[str, str]]) -> Outlook:
    """The outlook with these assumptions before its own."""
    return replace(found, assumed=[*first, *found.assumed])


def _print(console: Console, case: Case, found: Outlook, n: Numbers, verdict: Verdict) -> None:
    measured = "run" if case.seen is not None else "simulated"
    rows = Table("", "", "from", title="verl-tlt advise", show_header=True, title_justify="left")
    work = case.work
    fleet = f"{work.replicas} replicas, each of {work.tensor_parallel} GPUs; {work.gpus} GPUs train"
    rows.add_row("the run", f"{work.requests} responses on {fleet}", "recipe")
    rows.add_row("rollout's share of a step", f"{n.share:.0%} ({n.gen_s:.1f} of {n.gen_s + n.rest_s:.1f} s)", measured)
    rows.add_row("a step with a rollout of 0 s (Amdahl)", f"{n.bound:.2f}x", "1 / (1 - share)")
    by_batch = case.seen is not None and case.seen.seconds_by_batch
    rows.add_row("tail: engine time at batches below 32", f"{n.tail_share:.0%}", measured if by_batch else "simulated")
    has_bubble = case.seen is not None and case.seen.bubble_s is not None
    rows.add_row("bubble, mean of the replicas", f"{n.bubble_s:.1f} s; a session needs {n.bubble_needed_s:.1f} s",
                 measured if has_bubble else "simulated")  # fmt: skip
    if n.tool_share:
        rows.add_row("waiting for tools", f"{n.tool_share:.0%} of a response's time", measured)
    context = _context(case, found)
    table = break_even(found.costs["likely"], BATCHES, case.arms, context)
    for batch in (b for b in BATCHES if b <= max(work.max_num_seqs, 8)):
        cells = ", ".join(f"K={k} {tau:.2f}" for k, tau in table[batch].items())
        rows.add_row(f"break-even accept length, batch {batch}", cells, f"step costs, {context} tokens of context")
    if n.accept is not None:
        rows.add_row("accept length at K of up to 3", f"{n.accept['likely']:.2f} ({n.accept['low']:.2f} to "
                     f"{n.accept['high']:.2f})", "run" if case.seen and case.seen.acceptance else
                     "given" if case.acceptance else "assumed")  # fmt: skip
    rows.add_row("rollout, against stock", _span(n.rollout), "simulated")
    rows.add_row("step, against stock", _span({name: n.step(name) for name in SETTINGS}), "Amdahl with the above")
    console.print(rows)
    if case.seen is not None:
        console.print(
            f"Run: {case.seen.source}, {case.seen.steps} steps", highlight=False, markup=False, soft_wrap=True
        )
    if found.assumed:
        console.print("Assumed:", style="bold")
        for what, why in found.assumed:
            console.print(f"  {what}: {why}", highlight=False, markup=False)
    console.print("Knobs:", style="bold")
    for sentence in knobs(case, n):
        console.print(f"  {sentence}", highlight=False, markup=False)
    style = {"yes": "bold green", "no": "bold red", "it depends": "bold yellow"}[verdict.answer]
    console.print(f"Does it pay? {verdict.answer}: {verdict.because}", style=style, highlight=False, markup=False)


def _span(v: Mapping[str, float]) -> str:
    return f"{v['likely']:.2f}x ({v['low']:.2f} to {v['high']:.2f})"
