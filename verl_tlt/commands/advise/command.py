"""`verl-tlt advise`: prints what a run could gain, and the verdict."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from verl_tlt.commands.advise.estimate import (
    NO_LIMIT,
    SPEEDUPS,
    DraftingGain,
    RunShape,
    drafting_gains,
    shape_of,
    steps_to_repay,
    verdict,
)
from verl_tlt.commands.console import say
from verl_tlt.commands.options import AdviseOptions
from verl_tlt.commands.run_metrics import read_runs
from verl_tlt.errors import TLTError
from verl_tlt.files.json_files import read_json
from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyTable


def advise(options: AdviseOptions, console: Console) -> None:
    """Print the advice. Raises `TLTError` where the files do not hold what is needed."""
    source = ", ".join(map(str, options.metrics))
    run = shape_of(read_runs(options.metrics), source)
    gains: list[DraftingGain] = []
    minutes: float | None = None
    if options.drafter or options.costs:
        gains, minutes = read_gains(options, run)
    which = "without the first after a start"
    if run.only_first:
        first = "it" if run.steps == 1 else "each"
        which = f"but {first} is the first after a start, which is slow. Give a longer run."
    say(console, f"{source}: {counted(run.steps)} of stock verl, {which}")
    say(console, f"  rollout           {run.rollout_s:.1f} s of {run.step_s:.1f} s ({run.share:.0%})")
    if run.tail is not None:
        say(console, f"  longest response  {run.longest:,.0f} tokens, {run.tail:.1f} times the mean")
    console.print(ceilings_table(run))
    if gains:
        console.print(gains_table(run, gains, minutes))
    say(console, verdict(run, gains), "bold")
    say(console, "In separate_async a step can gain more: its rollout's time is only the trainer's wait.")


def read_gains(options: AdviseOptions, run: RunShape) -> tuple[list[DraftingGain], float | None]:
    """What the drafter gains by batch, and the minutes that its warm-up trained it; None: it is a run's."""
    if options.drafter is None or options.costs is None:
        raise TLTError("--drafter and --costs go together: the break-even needs the accept length and the step times.")
    from verl_tlt.drafter import provenance

    facts = provenance(options.drafter)
    if not facts.get("acceptance"):
        raise TLTError(
            f"--drafter {options.drafter} has no measured acceptance: take one of verl-tlt warmup or of a run."
        )
    try:
        costs = LatencyTable.from_list(read_json(options.costs).get("points"))
    except TLTError as error:
        raise TLTError(
            f"--costs {options.costs} is not a report of verl-tlt doctor --gpu with measured step times: {error}"
        ) from error
    context = max(SHORT_CONTEXT, run.prompt + (run.mean_length or 0.0) / 2)  # half of a response, on average
    gains = drafting_gains(costs, facts["acceptance"], context)
    if not gains:
        raise TLTError(f"--costs {options.costs} has no batch with steps both with and without a drafter.")
    seconds = facts.get("training_seconds")
    return gains, None if seconds is None else seconds / 60


def ceilings_table(run: RunShape) -> Table:
    table = Table("if the rollout is", "a step is", box=box.SIMPLE_HEAD)
    for speedup in SPEEDUPS:
        table.add_row(f"{speedup:g} times as fast", f"{run.step_speedup(speedup):.2f} times as fast")
    if run.ceiling < NO_LIMIT:
        table.add_row("instantaneous", f"{run.ceiling:.2f} times as fast")
    return table


def gains_table(run: RunShape, gains: Sequence[DraftingGain], minutes: float | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    repaid = [] if minutes is None else [f"training of {minutes:.0f} min repaid after"]
    for heading in ("batch", "best K", "break-even accept length", "measured", "decoding", "step", *repaid):
        table.add_column(heading, justify="right")
    for gain in gains:
        row = [
            str(gain.batch),
            str(gain.draft_length),
            f"{gain.break_even:.2f}",
            f"{gain.accept_length:.2f}",
            f"{gain.speedup:.2f}x",
            f"{run.step_speedup(gain.speedup):.2f}x",
        ]
        if minutes is not None:
            steps = steps_to_repay(run, gain.speedup, minutes)
            row.append("never" if steps is None else counted(math.ceil(steps)))
        table.add_row(*row)
    return table


def counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps:,} steps"
