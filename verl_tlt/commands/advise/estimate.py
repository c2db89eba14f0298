"""How much a faster rollout can gain in a run. Numbers only.

If the rollout is a share f of a step and becomes s times as fast, the step becomes 1 / (1 - f + f / s) times as fast
(Amdahl's law). A draft of K tokens pays where its accept length is above the break-even: the time of an engine step
that drafts and verifies K tokens, divided by that of a step without a drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from verl_tlt.commands.run_metrics import LoggedRun
from verl_tlt.errors import TLTError
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyTable
from verl_tlt.speculation.types import OFF

ROLLOUT, STEP, CHECKPOINT = "timing_s/gen", "timing_s/step", "timing_s/save_checkpoint"
MEAN_LENGTH, LONGEST, PROMPT = "response_length/mean", "response_length/max", "prompt_length/mean"
TURNS = "num_turns/mean"
SPEEDUPS = (1.5, 2.0, 3.0)
"""How many times as fast the rollout is assumed to become; the paper's rollouts are at most 2.3 times as fast."""
WORTH = 1.15
"""How many times as fast a step must become to be worth the trouble of another component."""
NO_LIMIT = 100.0
"""Above this the ceiling is not printed: everything but the rollout takes less than 1 % of a step."""
SHORT_TAIL = 1.5
"""Ratio of the longest response to the mean below which the batch stays large until the end."""
SINGLE_TURN = 2.0
"""Turns that verl counts in a response without tools: the prompt and the answer."""
MEASURE = "Measure it: verl-tlt compare -- YOUR COMMAND."


@dataclass(frozen=True)
class RunShape:
    """Medians over the steps of a run without TLT; seconds are of one step, without its checkpoint."""

    steps: int
    rollout_s: float
    step_s: float
    share: float
    """The rollout's share of a step."""
    mean_length: float | None
    """Tokens; None: not logged."""
    longest: float | None
    """Tokens of a step's longest response; None: not logged."""
    turns: float | None = None
    """Turns of a response, on average; None: not logged."""
    prompt: float = 0.0
    """Tokens of a prompt, on average; 0: not logged."""
    only_first: bool = False
    """Whether every step is the first after a start, which is slow."""

    @property
    def tail(self) -> float | None:
        """How many times as long as the mean the longest response is; None: not logged."""
        return self.longest / self.mean_length if self.longest and self.mean_length else None

    @property
    def why_large(self) -> str:
        """Why the batch stays large until the end of the rollout, as the end of a sentence; empty: it does not."""
        if self.tail is None or self.tail >= SHORT_TAIL:
            return ""
        return f"the longest response is only {self.tail:.1f} times the mean, so the batch stays large until the end"

    def step_speedup(self, rollout_speedup: float) -> float:
        """How many times as fast a step becomes if decoding does."""
        return 1.0 / max(1.0 - self.share + self.share / rollout_speedup, 1e-3)

    @property
    def ceiling(self) -> float:
        return self.step_speedup(float("inf"))


@dataclass(frozen=True)
class DraftingGain:
    """What the best draft length gains at one batch."""

    batch: int
    draft_length: int
    break_even: float
    """Accept length above which it pays."""
    accept_length: float
    """The drafter's, as it was measured."""

    @property
    def ratio(self) -> float:
        """How many times as fast decoding is with drafts of this length."""
        return self.accept_length / self.break_even

    @property
    def speedup(self) -> float:
        """How many times as fast decoding is; 1 where nothing is drafted because it does not pay."""
        return max(1.0, self.ratio)


def shape_of(run: LoggedRun, source: str) -> RunShape:
    """The shape of a run with stock verl; the first step after each start is left out if there are others."""
    finished = _finished_steps(run, source)
    later = [metrics for step, metrics in finished.items() if step not in run.starts]
    rows = later or list(finished.values())
    seconds = [(row[ROLLOUT], row[STEP] - row.get(CHECKPOINT, 0.0)) for row in rows]

    def usual(name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return median(values) if values else None

    return RunShape(
        steps=len(rows),
        rollout_s=median(rollout for rollout, _ in seconds),
        step_s=median(step for _, step in seconds),
        share=min(1.0, median(rollout / step for rollout, step in seconds)),
        mean_length=usual(MEAN_LENGTH),
        longest=usual(LONGEST),
        turns=usual(TURNS),
        prompt=usual(PROMPT) or 0.0,
        only_first=not later,
    )


def _finished_steps(run: LoggedRun, source: str) -> dict[int, dict[str, float]]:
    """The metrics of the steps whose times are known; a `TLTError` where there are none, or where TLT was on."""
    timed = {step: m for step, m in run.steps.items() if m.get(ROLLOUT, 0.0) > 0 and STEP in m}
    finished = {step: m for step, m in timed.items() if m[ROLLOUT] <= m[STEP] - m.get(CHECKPOINT, 0.0)}
    if timed and not finished:
        raise TLTError(
            f"{source} has no step whose {STEP} is above its {ROLLOUT} and {CHECKPOINT}: they are of different runs."
        )
    if not finished:
        absent = [name for name in (ROLLOUT, STEP) if not any(name in m for m in run.steps.values())]
        if len(absent) == 1:
            raise TLTError(f"{source} has no {absent[0]}: give the file with this metric too.")
        logged = "its file logger, its console, or W&B's CSV"
        raise TLTError(f"{source} has no step with {ROLLOUT} and {STEP}: give what verl logged in a run ({logged}).")
    if any(name.startswith("tlt/") for metrics in finished.values() for name in metrics):
        raise TLTError(f"{source} is from a run with TLT: give one with stock verl, or use verl-tlt report.")
    return finished


def drafting_gains(
    costs: LatencyTable, acceptance: Sequence[float], context: float = SHORT_CONTEXT
) -> list[DraftingGain]:
    """The best draft length by batch, ascending, of those that were measured both with and without a drafter.

    Args:
        costs: measured seconds of engine steps.
        acceptance: by draft position, the share of drafts accepted there, of those accepted up to there.
        context: tokens of a request's context in the steps that are compared.
    """
    without = {batch for batch, _ in costs.by_batch(OFF)}
    best: dict[int, DraftingGain] = {}
    for k, accept_length in enumerate(expected_accept_lengths(acceptance, len(acceptance))[1:], 1):
        for batch in sorted(without & {batch for batch, _ in costs.by_batch(k)}):
            break_even = costs.seconds(k, batch, context) / costs.seconds(OFF, batch, context)
            gain = DraftingGain(batch, k, float(break_even), accept_length)
            if batch not in best or gain.ratio > best[batch].ratio:
                best[batch] = gain
    return [best[batch] for batch in sorted(best)]


def steps_to_repay(run: RunShape, rollout_speedup: float, minutes: float) -> float | None:
    """After how many RL steps a warm-up of so many minutes is repaid; None: never."""
    saved_s = run.step_s * (1.0 - 1.0 / run.step_speedup(rollout_speedup))
    return 60.0 * minutes / saved_s if saved_s > 0 else None


def verdict(run: RunShape, gains: Sequence[DraftingGain] = ()) -> str:
    """The answer in one sentence or two, and what it does not know."""
    if run.turns is None or run.turns <= SINGLE_TURN:
        return _answer(run, gains)
    tools = "this estimate counts the time of tools as decoding, so the true gain is smaller."
    return f"{_answer(run, gains)} Responses have {run.turns:.2f} turns on average: {tools}"


def _answer(run: RunShape, gains: Sequence[DraftingGain]) -> str:
    most = f"at most {run.ceiling:.2f}x" if run.ceiling < NO_LIMIT else "a step gains what the rollout gains"
    known = f"Rollout is {run.share:.0%} of a step: {most}."
    if gains:
        return f"{known} {_measured_answer(run, gains)}"
    twice = run.step_speedup(2.0)
    if twice < WORTH:
        return f"{known} Not worth it."
    if run.why_large:
        return f"{known} But {run.why_large}: probably not worth it."
    if run.step_speedup(SPEEDUPS[0]) < WORTH:
        return f"{known} Only worth it with a good drafter: {twice:.2f}x if the rollout is twice as fast. {MEASURE}"
    return f"{known} Worth trying: {twice:.2f}x if the rollout is twice as fast. {MEASURE}"


def _measured_answer(run: RunShape, gains: Sequence[DraftingGain]) -> str:
    """The verdict on a drafter, by its largest gain, or by that of the largest batch if the batch stays large."""
    if run.why_large:
        gain = max(gains, key=lambda gain: gain.batch)
        where = f" at a batch of {gain.batch}, the largest measured: {run.why_large}"
        limit = ""
    else:
        gain = max(gains, key=lambda gain: gain.speedup)
        where = f", at a batch of {gain.batch}"
        limit = "at most "
    step = run.step_speedup(gain.speedup)
    worth = MEASURE if step >= WORTH else "Not worth it with this drafter."
    return f"With this drafter {limit}{step:.2f}x{where}. {worth}"
