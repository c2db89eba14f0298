"""A drain, what each arm is expected to take for it, and the rule by which a race of draft lengths is judged.

A drain is a batch of requests that begin together. Most responses are short and some are long, so the batch shrinks.
Numbers only.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.intervals import ratio
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF

VLLM = "vllm-k"
"""Before a draft length: an arm under vLLM's own scheduler."""
FIXED = (1, 2, 3, 5, 7)
"""Draft lengths that vLLM's own scheduler keeps, an arm each."""
LONGEST = FIXED[-1]
NONE, TABLE, OURS = "off", "table", "live_table"
ADAPTIVE = (TABLE, OURS)
OF_FIXED = tuple(f"{VLLM}{k}" for k in FIXED)
ARMS = (NONE, *OF_FIXED, *ADAPTIVE)
GRAIN = 1.0 / 32.0
"""Relative change of the batch at which a segment of a predicted drain ends."""
GROWTH = 0.25
"""Relative growth of the mean context at which one ends."""
LEAST, FEWEST = 1.05, 8
CLAIM = "a chosen K beats every fixed K"
RULE = (
    f'"{CLAIM}" is claimed of a load only if, over {FEWEST} rounds or more, the lower end of the 95 % interval of '
    f"every fixed K's adjusted seconds over {OURS}'s is above {LEAST}; otherwise the claim appears nowhere. "
    "Adjusted: an arm's measured seconds over those predicted for the lengths that it sampled, times those predicted "
    "for the lengths of all arms."
)
Round = Mapping[str, Mapping[str, Any]]
"""By arm its `seconds`, and the `lengths` of its responses."""
Expected = Callable[[Sequence[int], str], float]
"""Seconds that an arm is expected to take for responses of these lengths."""


@dataclass(frozen=True)
class Drain:
    """Requests that begin together: of short and of long chains, or as many equal ones as a negative control."""

    short: int
    long: int
    longest: int
    """Tokens of a response at most."""
    equal: bool = False
    """Whether each response has `longest` tokens; otherwise the policy ends it."""

    @classmethod
    def parse(cls, text: str) -> Drain:
        """`SHORT+LONG@MOST`, as in `192+4@1000`; or `REQUESTSxTOKENS`, as in `4x400`."""
        number = r"([1-9]\d{0,5})"
        if found := re.fullmatch(rf"{number}\+{number}@{number}", text):
            short, long, longest = map(int, found.groups())
            return cls(short, long, longest)
        if found := re.fullmatch(rf"{number}x{number}", text):
            return cls(int(found[1]), 0, int(found[2]), equal=True)
        raise ArgumentTypeError(f"{text!r} is not SHORT+LONG@MOST, as in 192+4@1000, or REQUESTSxTOKENS, as in 4x400")

    def __str__(self) -> str:
        return f"{self.short}x{self.longest}" if self.equal else f"{self.short}+{self.long}@{self.longest}"

    @property
    def requests(self) -> int:
        return self.short + self.long


LOADS = tuple(map(Drain.parse, ("192+4@1000", "144+2@1000", "44+4@1000", "11+1@1000", "4x400")))
"""Two wide starts with a long tail, two narrower ones, and a batch that stays the same to its end."""


def predict(costs: LatencyTable, acceptance: Sequence[float], lengths: Sequence[int], prompt: int, arm: str) -> float:
    """Seconds that an arm is expected to take for responses of these lengths, after prompts of `prompt` tokens.

    Computed from measured step costs and the drafter's held-out acceptance, without luck or learning. An adaptive arm
    takes the best K in every step.
    """
    tau = expected_accept_lengths(acceptance, LONGEST)
    chosen = [int(arm.removeprefix(VLLM))] if arm.startswith(VLLM) else range(LONGEST + 1)
    return decode(costs, {OFF: 1.0} if arm == NONE else {k: tau[k] for k in chosen}, lengths, prompt)


def decode(costs: LatencyTable, gains: Mapping[int, float], lengths: Sequence[int], prompt: int) -> float:
    """Seconds to decode responses of these lengths together, if a request gains `gains[K]` tokens in a step at K.

    Engine steps are the same in each of a series of segments. In each the draft length is the one with the most tokens
    per second. A token of a prompt costs as much as one in the largest step.
    """

    def step_s(batch: int, kv_tokens: int, k: int) -> float:
        return float(costs.seconds(k, batch, kv_tokens / batch))

    whole = np.array(lengths, dtype=np.float64)  # tokens of the responses that are not done, [batch]
    left = whole.copy()  # tokens to go
    widest, widest_s = costs.by_batch(OFF)[-1]
    seconds = left.size * prompt * widest_s / widest
    while left.size:
        batch = left.size
        kv_tokens = round(float((whole - left).sum())) + batch * prompt
        k = max(gains, key=lambda k: gains[k] / step_s(batch, kv_tokens, k))
        needed = left / gains[k]  # steps each request still takes
        ending = min(batch, max(1, round(batch * GRAIN)))
        until_fewer = float(np.partition(needed, ending - 1)[ending - 1])
        steps = min(until_fewer, max(1.0, GROWTH * (kv_tokens / batch + 64.0) / gains[k]))
        gained = np.minimum(gains[k] * steps, left)
        middle = max(1, round(float(np.clip(needed / steps, 0.0, 1.0).sum())))  # mean batch of the segment
        middle_kv = round(kv_tokens * middle / batch + 0.5 * float(gained.sum()))
        seconds += steps * step_s(middle, middle_kv, k)
        left = left - gained
        going = left > 1e-9
        whole, left = whole[going], left[going]
    return seconds


def over_ours(rounds: Sequence[tuple[Round, Expected]]) -> dict[str, dict[str, list[float]]]:
    """Each other arm's seconds over ours, all rounds pooled, as [ratio, low, high] (95 %): `plain` and `adjusted`.

    Each round comes with its race's expectation.
    """
    expected = {arm: sum(expect(each[a]["lengths"], arm) for each, expect in rounds for a in ARMS) for arm in ARMS}
    own = [{arm: expect(each[arm]["lengths"], arm) for arm in ARMS} for each, expect in rounds]
    found: dict[str, dict[str, list[float]]] = {"plain": {}, "adjusted": {}}
    for arm in (arm for arm in ARMS if arm != OURS):
        theirs, ours = (
            [(float(each[of]["seconds"]), predicted[of]) for (each, _), predicted in zip(rounds, own, strict=True)]
            for of in (arm, OURS)
        )
        pairs = list(zip(theirs, ours, strict=True))
        found["plain"][arm] = ratio(pairs, lambda side: side[0], lambda _: 1.0)
        adjusted, scale = ratio(pairs, lambda side: side[0], lambda side: side[1]), expected[arm] / expected[OURS]
        found["adjusted"][arm] = [round(scale * value, 4) for value in adjusted]
    return found


def verdict(over: Mapping[str, Sequence[float]], rounds: int) -> str:
    """What the rule says of a load by its adjusted ratios, a sentence."""
    fixed = [arm for arm in over if arm.startswith(VLLM)]
    best = min(fixed, key=lambda arm: over[arm][0])
    shown = "{:.2f}x ({:.2f} to {:.2f})".format(*over[best])
    holds = all(over[arm][1] > LEAST for arm in fixed) and rounds >= FEWEST
    said = f"{CLAIM} here" if holds else f"by the rule it is not claimed that {CLAIM}"
    return f"In {rounds} rounds {OURS} is {shown} as fast as K={best.removeprefix(VLLM)}, the fastest fixed K: {said}."
