"""Policies that the engine tests name as `tlt.speculation.policy`: they stress, they do not optimise."""

from __future__ import annotations

import random
from collections.abc import Callable

from step_costs import step_costs

from verl_tlt.speculation.types import OFF, Policy, Step

COSTS = step_costs({k: [(b, 0.001 * (1 + 0.03 * b * (k + 1))) for b in (1, 2, 4, 8, 64)] for k in (OFF, *range(8))})
"""Step costs by which small batches are worth long drafts, and large ones none."""


class Scripted(Policy):
    """Chooses by a function of the step number and batch, and keeps what it was asked and told."""

    def __init__(self, choose: Callable[[int, int], int]) -> None:
        self._choose = choose
        self.batches: list[int] = []
        self.chosen: list[int] = []
        self.steps: list[Step] = []

    def choose(self, batch: int) -> int:
        """The scripted K."""
        self.batches.append(batch)
        self.chosen.append(self._choose(len(self.batches), batch))
        return self.chosen[-1]

    def observe(self, step: Step) -> None:
        """Remember."""
        self.steps.append(step)


def rand(arms: tuple[int, ...], largest_batch: int) -> Scripted:
    """Any K in any step."""
    rng = random.Random(7)
    return Scripted(lambda *_: rng.choice(arms))


def longest(arms: tuple[int, ...], largest_batch: int) -> Scripted:
    """K_max always."""
    return Scripted(lambda *_: arms[-1])


def up_to_four(arms: tuple[int, ...], largest_batch: int) -> Scripted:
    """K_max for at most four requests, else none: flips when the count is wrong by one."""
    return Scripted(lambda _, batch: arms[-1] if batch <= 4 else 0)
