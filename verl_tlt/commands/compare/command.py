"""`verl-tlt compare`: takes the turns that are left, and reports the results of all of them."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from verl_tlt.commands.advise.estimate import shape_of
from verl_tlt.commands.capture import started_in
from verl_tlt.commands.compare.job import keep_only, take_turn
from verl_tlt.commands.compare.plan import (
    Arm,
    Plan,
    check_arms,
    first_drafter,
    make_plan,
    measured_with,
    named_arms,
    without_drafter,
)
from verl_tlt.commands.compare.record import Record
from verl_tlt.commands.compare.result import arm_rows, found_of, left_out_rows
from verl_tlt.commands.console import say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.options import CompareOptions
from verl_tlt.commands.run_metrics import read_run
from verl_tlt.files.disk import check_writable, free_bytes, replacing
from verl_tlt.upstream.versions import require

SAY_EVERY_S = 600.0
ROWS = "compare.json"
HEADINGS = (
    "arm", "rollout,\ntimes as fast\nper token", "step,\ntimes as fast\nper token", "accept\nlength", "reward",
    "largest\nprobability\ndifference",
)  # fmt: skip
LEFT_OUT = ("arm", "start and end of a job (s)", "its first step (s)", "checkpoint (s)")
FEW_STEPS = 100
"""RL steps in which a drafter that begins untrained does not make up for its training: the toy needed more than 24."""


def compare(options: CompareOptions, console: Console) -> None:
    """Run the recipe with stock verl and with TLT, and print how they compare; what was measured is always kept."""
    folder = options.out.resolve()
    check_writable(folder, "--out")
    environment = started_in()  # before the command is captured: what it exports itself, it exports in each turn
    typed = tuple(options.overrides or ())
    recipe = options.recipe()
    require("verl", "vllm")  # where the command starts verl
    plan = make_plan(recipe, options.steps, folder, options.command, typed=typed, environment=environment)
    names = options.arms.replace(" ", "").split(",")
    drafter = first_drafter(plan, names, options.drafter)
    arms = named_arms(names, drafter)
    check_arms(plan, arms, drafter)
    record = Record(plan.folder, plan.asked(arms) | measured_with(plan.recipe))
    announce(plan, arms, options, record, drafter, console)
    stall_s = 60.0 * options.stall_minutes
    try:
        with interruptible():
            take_turns(plan, arms, options.rounds, record, console, stall_s, lambda: write(plan, arms, record))
    except KeyboardInterrupt:
        say(console, "Interrupted: the job under way is lost. The same command runs the jobs that are left.")
        raise
    finally:
        report(plan, arms, record, console)


def take_turns(
    plan: Plan,
    arms: Sequence[Arm],
    rounds: int,
    record: Record,
    console: Console,
    stall_s: float,
    keep: Callable[[], object],
) -> None:
    """Take the turns that `record` lacks, and add each to it; `keep` is called after each."""
    by_name = {arm.name: arm for arm in arms}
    for name, turn in record.left(by_name, rounds):
        what = f"{name}, job {turn + 1} of {rounds}"
        progress = Progress(console, what, plan.steps, record.seconds_left(by_name, rounds))
        taken = take_turn(plan, by_name[name], turn, stall_s, progress.tell, [record.lock.fileno()])
        record.add(taken)
        keep_only(plan.folder / name, plan.checkpoint(by_name[name], turn + 1))
        pace = ", ".join(f"{step.rollout_s:.1f}/{step.step_s:.1f}" for step in taken.steps)
        say(console, f"{what} took {clock(taken.seconds)}; rollout/step s: {pace}")
        keep()


@dataclass
class Progress:
    """Prints how far a turn is: after each step, and every ten minutes."""

    console: Console
    what: str
    steps: int
    """Steps of the turn."""
    left_s: float | None
    """Seconds that all turns that are left will take, this one included; None: not known yet."""
    began: float = field(default_factory=time.monotonic)
    told: tuple[int, float] = (-1, 0.0)
    """Finished steps that were printed last, and when."""

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if done == self.told[0] and now - self.told[1] < SAY_EVERY_S:
            return
        self.told = (done, now)
        left = "" if self.left_s is None else f", about {clock(max(0.0, self.left_s - (now - self.began)))} left"
        say(self.console, f"{self.what}: {done} of {self.steps} steps{left}")


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def report(plan: Plan, arms: Sequence[Arm], record: Record, console: Console) -> None:
    """Print what the arms are and what the turns taken so far measured, and write the latter down."""
    result = found_of(arms, record)
    if not result["ratios"]:
        say(console, "No arm has steps to compare with stock's yet.")
        return
    for name, arm in result["arms"].items():
        say(console, f"{name}: {arm['label']}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in arm_rows(result):
        table.add_row(*row)
    console.print(table)
    others = Table(*LEFT_OUT, box=box.SIMPLE_HEAD, title="Left out of the ratios, in each job", title_justify="left")
    for row in left_out_rows(result):
        others.add_row(*row)
    console.print(others)
    for line in result["sentences"]:
        say(console, line)
    write(plan, arms, record)
    say(console, f"Rows: {plan.folder / ROWS}")


def write(plan: Plan, arms: Sequence[Arm], record: Record) -> None:
    """Write what was measured and concluded into the comparison's folder."""
    result = found_of(arms, record)
    with replacing(plan.folder / ROWS) as file:
        file.write(json.dumps(result, indent=1).encode())


def announce(
    plan: Plan, arms: Sequence[Arm], options: CompareOptions, record: Record, drafter: str | None, console: Console
) -> None:
    """Print what is about to happen, how long it takes, and what may make it useless."""
    for arm in arms:
        say(console, f"{arm.name}: {arm.label}")
    say(console, f"All begin with {plan.start or 'the policy of the recipe'}.")
    say(console, time_needed(plan, arms, options, record))
    free = free_bytes(plan.folder)
    room = "which does not tell its free space" if free is None else f"where {free / 1e9:.0f} GB are free"
    say(console, f"Disk: a checkpoint for each arm and two more in {plan.folder}, {room}.")
    steps = options.rounds * plan.steps
    if drafter is not None:
        return
    for name, trains in without_drafter(plan, arms).items():
        if trains and steps >= FEW_STEPS:
            continue
        why = f"and {steps} steps are too few to train one" if trains else "which does not train one"
        missing = f"No drafter is given for {name}, {why}: this measures what TLT costs, not what it gains."
        say(console, f"{missing} Give one with --drafter.", "yellow")


def time_needed(plan: Plan, arms: Sequence[Arm], options: CompareOptions, record: Record) -> str:
    """How long the jobs that are left will take: by the turns taken, or by the metrics of an earlier run."""
    names = [arm.name for arm in arms]
    jobs = len(record.left(names, options.rounds))
    what = f"{jobs} jobs of {plan.steps} RL steps each are left, one after the other"
    if (seconds := record.seconds_left(names, options.rounds)) is not None:
        return f"{what}: about {clock(seconds)}."
    if options.metrics is not None:
        step_s = shape_of(read_run(options.metrics), str(options.metrics)).step_s
        return f"{what}: about {clock(jobs * plan.steps * step_s)}, and {jobs} times the start and end of a job."
    hint = "Give the metrics of an earlier run with --metrics to see how long that takes."
    return f"{what}: {jobs * plan.steps} steps and {jobs} starts. {hint}"
