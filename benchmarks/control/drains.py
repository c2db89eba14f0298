"""A drain, what it is expected to take by draft length, and the rule that a race of draft lengths is judged by.

A drain is a batch of requests that begin together. Most responses are short and some are long, so the batch shrinks.
Numbers only.
"""

from __future__ import annotations

import random
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.control.engine import VLLM
from benchmarks.simulate.hardware import TableCost, steady
from verl_tlt.commands.advise.simulation import EngineSpec, decode
from verl_tlt.commands.compare.result import ratio
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

FIXED = (1, 2, 3, 5)
"""Draft lengths that vLLM's own scheduler keeps, an arm each."""
LONGEST = FIXED[-1]
NONE, ADAPTIVE = "off", ("table", "goodput")
ARMS = (NONE, *(f"{VLLM}{k}" for k in FIXED), *ADAPTIVE)
LEAST, FEWEST = 1.05, 8
CLAIM = "adaptive beats a fixed K"
RULE = (
    f'"{CLAIM}" is said of a load only if the lower end of the 95 % interval of the fastest fixed K\'s seconds over '
    f"goodput's, {FEWEST} rounds at least and all of them pooled, is above {LEAST}; else nowhere. "
    "Seconds are divided by what the arm's responses would take without drafts, by the calibration: arms that sample "
    "write other lengths."
)


@dataclass(frozen=True)
class Drain:
    """Requests that begin together, and between what their responses' lengths are drawn, in tokens."""

    requests: int
    short: tuple[int, int]
    long: int = 0
    """How many of the requests have a long response."""
    tail: tuple[int, int] = (1, 1)
    """Between what the lengths of those are drawn."""
    own: int = 0
    """Above 0: each response is sampled until the policy ends it; so many tokens at most."""

    @classmethod
    def parse(cls, text: str) -> Drain:
        """`REQUESTS:SHORT` or `REQUESTS:SHORT:NxLONG`, a length being a number or a range: `64:20-60:1x400-600`.

        `REQUESTS:own-MOST`: responses that end by themselves, after so many tokens at most: `64:own-480`.
        """
        number = r"([1-9]\d{0,5})"
        if own := re.fullmatch(rf"{number}:own-{number}", text):
            return cls(int(own[1]), (1, 1), own=int(own[2]))
        found = re.fullmatch(rf"{number}:{number}(?:-{number})?(?::{number}x{number}(?:-{number})?)?", text)
        if found is None:
            raise ArgumentTypeError(
                f"{text!r} is not REQUESTS:SHORT, REQUESTS:SHORT:NxLONG or REQUESTS:own-MOST, as in 64:20-60:1x400"
            )
        requests, low, high, long, tail, end = (int(part) if part else 0 for part in found.groups())
        drain = cls(requests, (low, high or low), long, (tail or 1, end or tail or 1))
        if drain.long > drain.requests or any(low > high for low, high in (drain.short, drain.tail)):
            raise ArgumentTypeError(
                f"{text!r} has more long responses than requests, or a range that ends below its start"
            )
        return drain

    def __str__(self) -> str:
        if self.own:
            return f"{self.requests}:own-{self.own}"
        short, tail = ("-".join(map(str, sorted({*ends}))) for ends in (self.short, self.tail))
        return f"{self.requests}:{short}" + (f":{self.long}x{tail}" if self.long else "")

    @property
    def longest(self) -> int:
        """Tokens that no response has more of."""
        return self.own or max(self.short[1], self.tail[1])

    def lengths(self, turn: int) -> list[int]:
        """Tokens of every response in that round, the same for every arm, where lengths are drawn."""
        rng = random.Random(f"{self} {turn}")
        ends = [self.tail] * self.long + [self.short] * (self.requests - self.long)
        return [rng.randint(*end) for end in ends]


LOADS = (Drain.parse("64:own-480"), Drain.parse("4:40"))
"""A drain with the policy's own tail; and as a negative control one whose batch stays the same to its end."""


def predict(
    table: LatencyTable,
    acceptance: Sequence[float],
    rounds: Sequence[Sequence[int]],
    prompt: int,
    arms: Sequence[str] = ARMS,
) -> dict[str, float]:
    """Seconds that a drain is expected to take by each arm, the mean of these rounds' lengths.

    Computed from measured step costs and the drafter's held-out acceptance: no luck, no learning, no cost of context
    beyond what it was at the calibration. `prompt`: tokens of each, at what a token of the largest step costs.
    """
    batch, seconds = table.by_batch(OFF)[-1]
    tau = np.array(expected_accept_lengths(acceptance, LONGEST))
    lengths = {
        arm: (int(arm.removeprefix(VLLM)),) if arm.startswith(VLLM) else tuple(range(LONGEST + 1)) for arm in arms
    }
    found = {}
    for arm, chosen in lengths.items():
        spec = EngineSpec(steady(TableCost(table)), chosen, prefill_token_s=seconds / batch)
        gains = [None if arm == NONE else np.tile(tau, (len(tokens), 1)) for tokens in rounds]
        drained = [decode(spec, np.array(tokens), prompt, gain) for tokens, gain in zip(rounds, gains, strict=True)]
        found[arm] = round(float(np.mean([drain.seconds for drain in drained])), 3)
    return found


def over_goodput(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, list[float]]:
    """Each other arm's seconds over those of `goodput`, all rounds pooled: [ratio, low, high] (95 %).

    A round has `seconds` by arm, and `undrafted`: what the arm's responses would take without drafts, which each side
    is divided by.
    """
    found = {}
    for arm in (arm for arm in ARMS if arm != ADAPTIVE[-1]):
        theirs, ours = ([(each["seconds"][of], each["undrafted"][of]) for each in rounds] for of in (arm, ADAPTIVE[-1]))
        pooled = ratio([*zip(theirs, ours, strict=True)], lambda side: side[0], lambda side: side[1])
        found[arm] = [pooled["pooled"], pooled["low"], pooled["high"]]
    return found


def verdict(over: Mapping[str, Sequence[float]], rounds: int) -> str:
    """What the rule says of a load, a sentence."""
    best = min((arm for arm in over if arm.startswith(VLLM)), key=lambda arm: over[arm][0])
    shown = "{:.2f}x ({:.2f} to {:.2f})".format(*over[best])
    said = f"{CLAIM} here" if over[best][1] > LEAST and rounds >= FEWEST else f"by the rule it is not said that {CLAIM}"
    return f"In {rounds} rounds goodput is {shown} as fast as K={best.removeprefix(VLLM)}, the fastest fixed K: {said}."
