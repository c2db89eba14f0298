"""The policies that choose K before each engine step, by name in `tlt.speculation.policy`.

`live_table`, the default, is a list of K by batch size, as vLLM's own `num_speculative_tokens_per_batch_size`. It holds
the draft length with the most tokens per second, argmax τ(K) / T(batch, context, K), and is rebuilt while the run goes
on: T is calibrated at start, τ follows what is accepted.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np

from verl_tlt.speculation.acceptance import AcceptanceEstimate
from verl_tlt.speculation.costs import REBUILD_STEPS, LatencyTable, LiveCosts
from verl_tlt.speculation.limits import Limits
from verl_tlt.speculation.types import ControlError, Policy, Step

POLICIES = ("live_table", "fixed")
"""Names `make_policy` knows."""
HYSTERESIS = 0.01
"""Relative gain that is expected before K in the list is changed: a change costs about one step."""
PROBE_AFTER = 800
"""Steps in a row with drafts, or without, after which `PROBES` steps of the other kind are taken. So a drafter that has
improved is noticed within some seconds, and the time of a step without drafts stays known. This takes less than 1 % of
the steps."""
PROBES = 3
"""The first of these steps still verifies what the step before it drafted. The others draft and verify the same number
of tokens, so their times count."""


class FixedPolicy(Policy):
    """The same K in every step."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def choose(self, batch: int) -> int:
        return self._draft_length


class LiveTablePolicy(Policy):
    """K from a list by batch, rebuilt every few dozen steps; 0 until step costs are known.

    Draft lengths that were never measured are not used, nor, at a batch, those above the engine's `limits`.
    """

    def __init__(self, lengths: Sequence[int], largest_batch: int, limits: Limits | None = None) -> None:
        self.acceptance = AcceptanceEstimate(lengths[-1])
        self.table = [0] * (largest_batch + 1)
        """K by batch."""
        self._lengths = list(lengths)
        self._limits = limits or Limits(tuple(lengths))
        self._possible = np.zeros((0, 0), dtype=bool)  # [lengths, batches]: whether the engine drafts so much there
        self._costs: LiveCosts | None = None
        self._steps = 0  # since the last rebuild
        self._last_drafted = False
        self._steps_of_kind = 0  # steps in a row that drafted, or did not draft, as the last one
        self._probes: list[int] = []  # K of each probe that is still to be taken

    def choose(self, batch: int) -> int:
        if self._probes:
            return self._probes.pop()
        return self.table[min(batch, len(self.table) - 1)]

    def observe(self, step: Step) -> None:
        self.acceptance.observe(step.num_drafts, step.num_accepted_tokens_per_pos)
        if self._costs is None:
            return
        if step.batch:
            self._costs.observe(step)
        drafted = step.drafted > 0
        self._steps_of_kind = self._steps_of_kind + 1 if drafted == self._last_drafted else 1
        self._last_drafted = drafted
        if self._steps_of_kind >= PROBE_AFTER:
            self._steps_of_kind = 0
            shortest = next((k for k in self._costs.lengths if k > 0), 0)
            self._probes = [0 if drafted else shortest] * PROBES
        self._steps += 1
        if self._steps >= REBUILD_STEPS:
            self._rebuild()

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        self.acceptance = AcceptanceEstimate(self._lengths[-1], conditional)
        self._rebuild()

    def set_costs(self, costs: LatencyTable) -> None:
        self._costs = LiveCosts(costs, self._lengths, len(self.table) - 1) if 0 in costs.lengths() else None
        self.table = [0] * len(self.table)
        if self._costs is not None:
            fitting = self._limits.fitting
            batches = range(len(self.table))
            self._possible = np.array([[fitting(k, batch) == k for batch in batches] for k in self._costs.lengths])
        self._rebuild()

    def _rebuild(self) -> None:
        """Fill the list with the fastest K of each batch, or keep the K that is hardly slower."""
        self._steps = 0
        if self._costs is None:
            return
        lengths = self._costs.lengths
        tau = self.acceptance.accept_lengths()
        speed = np.array([tau[k] for k in lengths])[:, None] / self._costs.seconds()  # [lengths, batches]
        speed = np.where(self._possible, speed, 0.0)
        current = np.array([lengths.index(k) for k in self.table])
        batches = np.arange(len(self.table))
        best = speed.argmax(axis=0)
        better = speed[best, batches] > (1.0 + HYSTERESIS) * speed[current, batches]
        self.table = [lengths[i] for i in np.where(better, best, current)]


def make_policy(
    name: str, lengths: Sequence[int], largest_batch: int, fixed: int | None = None, limits: Limits | None = None
) -> Policy:
    """Build a policy for ascending draft lengths; a ControlError says what it cannot be built with.

    `name` is one of `POLICIES`, or `module:Class` of one's own, which is called with `lengths` and `largest_batch`.
    `fixed` is the K of the policy "fixed", None: the longest. `limits` are the engine's, None: it has none.
    """
    if name == "live_table":
        return LiveTablePolicy(lengths, largest_batch, limits)
    if name == "fixed":
        draft_length = lengths[-1] if fixed is None else fixed
        if draft_length not in lengths:
            raise ControlError(f"tlt.speculation.fixed={draft_length} is none of the draft lengths {list(lengths)}.")
        return FixedPolicy(draft_length)
    module, _, kind = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), kind)(lengths, largest_batch)
    except Exception as error:  # whatever the user's module and class raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        known = f"{', '.join(POLICIES)}, or module:Class of your own"
        raise ControlError(f"tlt.speculation.policy={name} cannot be used ({why}); known: {known}.") from error
    if not isinstance(made, Policy):
        raise ControlError(f"tlt.speculation.policy={name} is no verl_tlt.speculation.types.Policy.")
    return made
