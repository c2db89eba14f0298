"""How long a draft is: the one place where OFF, K and what bounds them are decided.

* Before a rollout: whether the drafter runs in it at all, or the engine decodes as stock (OFF). At K=0 vLLM still runs
  a pass of the drafter in every step, which a drafter that cannot pay is not worth, and the pass can be skipped for a
  whole rollout only, because its KV cache must have no holes. So the question is put after each weight sync, and
  answered from what is then known: acceptance on held-out text, step costs, where the last rollout spent its time, and
  whether drafting lost time in it (`Profitability`).
* In every step: K as the policy wants it, or as it was ordered, within what this step can have (`draft_length`).

Both weigh tokens against the seconds of a `LatencyModel`, which one calibration seeds, and read a drafter's expected
acceptance in one way (`expected_accept_lengths`), so that they cannot disagree on what a draft is worth. Server and
scheduler carry out what is decided here. Pure functions of numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.latency_table import CONTEXT_TOKENS
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF, Load, Policy

# ---------------------------------------------------------------------- in every step


class Limits(NamedTuple):
    """What bounds the draft length of an engine, whatever is wanted."""

    arms: tuple[int, ...]
    """Draft lengths, ascending from 0."""
    token_limit: int = 0
    """Tokens of the largest step with a CUDA graph; 0: no graphs, no limit."""
    context_limit: int = sys.maxsize
    """Tokens of context beyond which a longest draft would not fit into the drafter any more."""

    def outgrown(self, longest: int) -> bool:
        """Whether a step cannot draft because its longest context, in tokens, comes too near the drafter's end.

        One such request stops the drafter for the whole batch (vLLM `_input_fits_in_drafter`).
        """
        return longest > self.context_limit

    def fitting(self, wanted: int, batch: int) -> int:
        """`wanted`, or the longest arm below it whose step still has a graph; 0 at least."""
        wanted = max(0, min(wanted, self.arms[-1]))
        if not self.token_limit or batch * (1 + wanted) <= self.token_limit:
            return wanted
        return max((k for k in self.arms if k < wanted and batch * (1 + k) <= self.token_limit), default=0)

    def within(self, room: int) -> int:
        """The longest arm of at most `room` tokens."""
        return max((k for k in self.arms if k <= room), default=0)


STEPS_IN_FLIGHT = 4
"""Steps that vLLM schedules before it knows what came of the first: 1, with async scheduling 2, in a pipeline more."""


def room_before_stop(least: int, has: int, most: int) -> int:
    """Longest draft for a request that must not stop before its `least`th token; `sys.maxsize`: any.

    vLLM hides stop tokens row by row, and errs at the boundary: it judges the token behind a whole draft by the tokens
    before the draft, and under async scheduling every row by the tokens that there would be if all drafts in flight
    were accepted. Where all that a draft can reach lies on one side of the boundary, any way of counting is right.

    Args:
        least: `SamplingParams.min_tokens`.
        has: tokens that it has for certain.
        most: tokens that it can have when the draft is verified.
    """
    return sys.maxsize if has >= least else max(0, least - most - STEPS_IN_FLIGHT)


def draft_length(
    policy: Policy,
    load: Load,
    limits: Limits,
    *,
    longest: int = 0,
    room: int = sys.maxsize,
    drafting: bool = True,
    forced: int | None = None,
) -> int:
    """K of the coming step, or OFF. An engine step waits for this.

    Args:
        policy: who chooses; asked unless it is overruled, also where nothing can be drafted, so that it keeps count.
        load: what the step carries.
        limits: of the engine.
        longest: tokens of the longest context that the step may reach.
        room: no draft may be longer (`room_before_stop`).
        drafting: the drafter runs in this rollout.
        forced: a K ordered from outside.
    """
    if not drafting:
        return OFF
    wanted = policy.choose(load) if forced is None else forced
    if limits.outgrown(longest):
        return 0
    return limits.fitting(wanted if wanted <= room else limits.within(room), load.batch)


# ---------------------------------------------------------------------- before a rollout

HOPELESS = 0.05
"""A drafter accepted less often than this nowhere pays, whatever a step costs: each draft token costs more than 5 %."""
WORTH = 0.97
"""Drafting must be expected to cut a rollout's time to this share before the drafter runs at all."""
UNTRIED = 0.9
"""The same while no drafter has run in this run: the estimate rests on short contexts and on text of older steps alone,
and a rollout is lost on finding out."""
BETTER = 1.05
"""After drafting lost time, a drafter must promise this much longer accept lengths to be tried again."""
COMPARED = 0.5
"""Share of its decoding time that an engine's account must cover to count: the rest may have gone the other way, and
the end of one long response says little."""


class Profitability:
    """Whether one engine's drafter shall run, rollout after rollout.

    Args:
        policy: `tlt.speculation.policy`.
        source: `tlt.speculation.source`; with "both" n-grams draft beside the drafter, whatever that is worth.
    """

    def __init__(self, policy: str, source: str = "eagle") -> None:
        self.policy = policy
        self._always = policy == "fixed" or (source == "both" and policy != "off")
        self._costs: StepCosts | None = None
        self._longest = 1
        self._work: Mapping[int, float] = {}
        self._lost = 0.0
        self._worth = UNTRIED

    def set_costs(self, calibration: LatencyTable) -> None:
        """Take note of measured step costs; without a figure for OFF, or for any draft length, they say nothing."""
        arms = calibration.arms()
        self._longest = max(arms, default=1)
        self._costs = StepCosts(calibration) if OFF in arms and self._longest >= 0 else None

    def decide(self, acceptance: Sequence[float]) -> bool:
        """Whether the drafter shall run in the coming rollout.

        Args:
            acceptance: conditional acceptance per draft position, from held-out data; empty: unknown.
        """
        if self._always:
            return True
        worth = is_profitable(acceptance, self._costs, self.policy, self._work, self._worth)
        return worth and self._promise(acceptance) > BETTER * self._lost

    def learn(
        self,
        stats: EngineStats,
        drafting: bool,
        acceptance: Sequence[float],
        saved: tuple[float, float] | None = None,
    ) -> None:
        """Take note of a rollout.

        Args:
            stats: its sums.
            drafting: whether the drafter ran in it.
            acceptance: what had been expected of it.
            saved: (seconds that drafting saved, seconds compared; `speculation.baseline`); None: unknown.
        """
        saved_s, compared_s = saved or (0.0, 0.0)
        self._work = {work.batch: work.tokens for work in stats.work if work.tokens > 0} or self._work
        spent_s = sum(work.seconds for work in stats.work)
        if drafting and compared_s > 0.0 and compared_s >= COMPARED * spent_s:
            self._worth = WORTH
            lost = -saved_s > (1.0 - WORTH) * compared_s
            self._lost = self._promise(acceptance) if lost else 0.0

    def _promise(self, acceptance: Sequence[float]) -> float:
        """Accept length at the longest draft; that of an unknown drafter is as good as any."""
        return expected_accept_lengths(acceptance, self._longest)[-1] if acceptance else 1.0


class StepCosts:
    """Seconds of a step at the contexts of the calibration, the one occasion at which all arms met the same load.

    Args:
        calibration: OFF, K=0 and usually more, at some batches.
    """

    def __init__(self, calibration: LatencyTable) -> None:
        self.arms = tuple(k for k in calibration.arms() if k >= 0)
        self.batches = sorted({p.batch for p in calibration.points if p.draft_length == OFF})
        self._model = LatencyModel(self.arms, table=calibration)

    def at(self, batch: int) -> tuple[float, list[float]]:
        """(seconds of OFF, those of every arm)."""
        off, *drafting = self._model.predict(batch, batch * CONTEXT_TOKENS)
        return off, drafting


def is_profitable(
    acceptance: Sequence[float],
    costs: StepCosts | None,
    policy: str,
    work: Mapping[int, float] | None = None,
    worth: float = WORTH,
) -> bool:
    """Whether drafting is expected to cut a rollout's time clearly.

    The expected time, with the best draft length at each batch, against OFF. Without measurements, or of an unknown
    drafter, drafting is tried: the policy finds out in a few steps.

    Args:
        acceptance: conditional acceptance per draft position, from held-out data; empty: unknown.
        costs: what steps cost; None: unknown.
        policy: `tlt.speculation.policy`.
        work: tokens decoded at each batch in the last rollout; nothing: one that spends as long at each measured batch
            (batches are measured evenly in log scale, and a long-tailed rollout drains that way).
        worth: share of OFF's time that drafting must be expected to stay below.
    """
    if policy == "off":
        return False
    if policy == "fixed" or not acceptance:
        return True
    if max(acceptance) < HOPELESS:
        return False
    if costs is None:
        return True
    tau = expected_accept_lengths(acceptance, costs.arms[-1])
    spent = stock = 0.0
    for batch in work or costs.batches:
        off, drafting = costs.at(batch)
        # A step with a drafter never takes less; where it was measured so, that was noise.
        share = min(max(s / off, 1.0) / tau[k] for k, s in zip(costs.arms, drafting, strict=True))
        weight = work[batch] / batch * off if work else 1.0  # the seconds that stock would spend at this batch
        spent += weight * share
        stock += weight
    return spent < worth * stock
