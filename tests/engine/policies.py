"""Policies the engine tests name in `additional_config.tlt.policy_factory`: they stress, they do not optimise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from verl_tlt.speculation.types import Load, Policy, Step


class Scripted(Policy):
    """Chooses by a function of the step number and load, and keeps what it was asked and told."""

    def __init__(self, choose: Callable[[int, Load], int]) -> None:
        self._choose = choose
        self.loads: list[Load] = []
        self.chosen: list[int] = []
        self.steps: list[Step] = []

    def choose(self, load: Load) -> int:
        """The scripted K."""
        self.loads.append(load)
        self.chosen.append(self._choose(len(self.loads), load))
        return self.chosen[-1]

    def observe(self, step: Step) -> None:
        """Remember."""
        self.steps.append(step)


def cycle(speculation: Mapping[str, Any], arms: tuple[int, ...], seed: int) -> Scripted:
    """Another K in every step."""
    return Scripted(lambda n, _: arms[n % len(arms)])


def rand(speculation: Mapping[str, Any], arms: tuple[int, ...], seed: int) -> Scripted:
    """Any K in any step."""
    rng = random.Random(7)
    return Scripted(lambda *_: rng.choice(arms))


def longest(speculation: Mapping[str, Any], arms: tuple[int, ...], seed: int) -> Scripted:
    """K_max always."""
    return Scripted(lambda *_: arms[-1])


def up_to_four(speculation: Mapping[str, Any], arms: tuple[int, ...], seed: int) -> Scripted:
    """K_max for at most four decoding requests, else none: flips when the count is wrong by one."""
    return Scripted(lambda _, load: arms[-1] if load.batch <= 4 else 0)
