"""The default policy: draft the length with the highest expected goodput, argmax τ(K) / T(batch, kv, K).

Acceptance is known for every draft length at once (`acceptance.py`) and latency is nearly stationary (`latency.py`),
so there is little left to explore. What remains is bounded:

* an arm is *probed* for a few steps only when its estimate is so uncertain or stale that it could beat the one in
  use, out of a small allowance of time, with an interval that doubles whenever a probe changed nothing;
* K=0 is an ordinary arm, so a useless drafter costs a few probes and then almost nothing;
* K changes only for a gain above a margin and not again within a few steps (vLLM issue 49548: flipping at a
  threshold costs more than either side of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_tlt.control.acceptance import AcceptanceEstimate
from verl_tlt.control.base import BasePolicy
from verl_tlt.control.costs import LatencyTable
from verl_tlt.control.errors import ControlError
from verl_tlt.control.latency import LatencyModel
from verl_tlt.control.types import OFF, Load, StepRecord


@dataclass(frozen=True)
class GoodputSettings:
    """Knobs of the goodput policy; the defaults are meant to be left alone."""

    switch_gain: float = 0.01
    """Relative goodput another draft length must promise before K changes."""
    on_gain: float = 0.02
    """Relative goodput over K=0 that drafting must promise before it starts."""
    off_gain: float = 0.0
    """Relative goodput over K=0 below which drafting stops; must not exceed `on_gain`."""
    hold: int = 4
    """Steps a new K is kept: the first verifies the old one, the others measure the new."""
    probe_share: float = 0.004
    """Share of the engine's time that probing may cost."""
    probe_interval: int = 64
    """Steps between probes; doubles after each probe that changed nothing."""
    probe_interval_max: int = 2048
    """Where the doubling ends: how late a drafter that became useful is noticed at worst, in engine steps."""
    optimism: float = 1.5
    """Standard deviations by which an arm's estimate is stretched to see whether a probe could pay."""

    def check(self) -> None:
        """Raise ControlError where two settings contradict each other or one is out of range."""
        if self.off_gain > self.on_gain:
            raise ControlError(
                f"Speculation setting off_gain={self.off_gain} is above on_gain={self.on_gain}: "
                "drafting would stop as soon as it started."
            )
        if self.hold < 1 or self.probe_interval < 1 or self.probe_interval_max < self.probe_interval:
            raise ControlError("Speculation settings need hold >= 1 and 1 <= probe_interval <= probe_interval_max.")
        if not 0.0 <= self.probe_share < 0.5 or self.switch_gain < 0.0 or self.optimism < 0.0:
            raise ControlError("Speculation settings need probe_share in 0..0.5, switch_gain >= 0 and optimism >= 0.")


class GoodputPolicy(BasePolicy):
    """Maximises expected tokens per second at the load at hand."""

    def __init__(self, arms: Sequence[int], settings: GoodputSettings | None = None) -> None:
        super().__init__()
        self._arms = tuple(arms)
        self._set = settings or GoodputSettings()
        self._set.check()
        self.acceptance = AcceptanceEstimate(self._arms[-1])
        self.latency = LatencyModel(self._arms)
        self._current = 0
        self._held = 0
        self._steps = 0
        self._widest = [0.0] * len(self._arms)
        self._probe_left = 0
        self._probe_arm = 0
        self._next_probe = 0
        self._interval = self._set.probe_interval
        self._allowance = 0.0
        self._probes = 0
        self._switches = 0
        self._histogram = [0] * len(self._arms)

    def decide(self, load: Load) -> int:
        """K for the coming step: the probe in progress, else the argmax with hysteresis."""
        self._steps += 1
        arm = self._pick(load)
        self._histogram[arm] += 1
        return self._arms[arm]

    def learn(self, step: StepRecord) -> None:
        """Learn acceptance from any verified draft and latency from clean steady steps."""
        if step.drafts > 0 and step.verified > 0:
            self.acceptance.observe(step.drafts, step.accepted)
        else:
            self.acceptance.skip(step.batch)
        if not step.clean:
            return
        self._allowance = min(self._allowance + self._set.probe_share, 8.0)
        if step.drafted == OFF:
            self.latency.observe(step.batch, step.kv_tokens, OFF, step.latency_s)
        elif step.drafted == step.verified and step.drafted in self._arms:
            self.latency.observe(step.batch, step.kv_tokens, step.drafted, step.latency_s)
            arm = self._arms.index(step.drafted)
            self._widest[arm] = max(self._widest[arm], step.batch)

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """A new drafter with this expected acceptance per position: start from it and look again soon."""
        self.acceptance.set_prior(conditional, weight=24.0)
        self._interval = self._set.probe_interval
        self._next_probe = self._steps

    def set_latency(self, table: LatencyTable) -> None:
        """Seed the latency model from a calibration or an earlier run."""
        self.latency.seed(table)
        for point in table.points:
            if point.draft_length in self._arms:
                arm = self._arms.index(point.draft_length)
                self._widest[arm] = max(self._widest[arm], point.batch)

    def summary(self) -> dict[str, Any]:
        """What was learned and done so far, JSON-able."""
        steps = max(sum(self._histogram), 1)
        return {
            "policy": "goodput",
            "draft_length_share": {str(k): n / steps for k, n in zip(self._arms, self._histogram, strict=True)},
            "conditional_acceptance": self.acceptance.conditional(),
            "probes": self._probes,
            "switches": self._switches,
        }

    def _pick(self, load: Load) -> int:
        if self._probe_left > 0:
            self._probe_left -= 1
            return self._probe_arm
        if self._held > 0:
            self._held -= 1
            return self._current
        cost = self.latency.predict(load.batch, load.kv_tokens)[1:]
        if cost[0] <= 0.0:
            return 0
        tau = self.acceptance.accept_lengths()
        goodput = [tau[k] / seconds for k, seconds in zip(self._arms, cost, strict=True)]
        self._move(goodput, self._reachable(load.batch))
        if self._steps >= self._next_probe and self._held == 0 and self._start_probe(load, goodput, cost):
            self._probe_left -= 1
            return self._probe_arm
        return self._current

    def _reachable(self, batch: int) -> int:
        """Arms that may be chosen: no unmeasured draft length is reached by jumping over another.

        A measurement at a larger batch counts, because it bounds the latency here from above.
        """
        last = 0
        for arm, widest in enumerate(self._widest):
            if widest * 1.5 >= batch:
                last = arm
        return min(last + 2, len(self._arms))

    def _move(self, goodput: list[float], reachable: int) -> None:
        best = max(range(reachable), key=goodput.__getitem__)
        now = self._current
        if best == now:
            return
        margin = self._set.switch_gain
        if now == 0:
            margin = max(margin, self._set.on_gain)
        elif best == 0:
            margin = self._set.off_gain
        if goodput[best] > goodput[now] * (1.0 + margin):
            self._current, self._held = best, self._set.hold - 1
            self._switches += 1
            self._interval = max(self._set.probe_interval, self._interval // 2)

    def _start_probe(self, load: Load, goodput: list[float], cost: list[float]) -> bool:
        """Start a probe of the nearest arm, up or down, that could beat the current one, if it is affordable."""
        optimism, now = self._set.optimism, self._current
        tau = self.acceptance.optimistic_accept_lengths(optimism)
        bar = goodput[now] * (1.0 + self._set.switch_gain)
        sigmas = self.latency.uncertainty(load.batch, load.kv_tokens)[1:]
        reachable = self._reachable(load.batch)
        for arm in (*range(now + 1, reachable), *range(now - 1, -1, -1)):
            seconds, sigma = cost[arm], sigmas[arm]
            hope = (tau[self._arms[arm]] if arm > now else goodput[arm] * seconds) / (
                seconds * (1.0 - optimism * sigma)
            )
            if hope <= bar:
                continue
            # Long enough to see a draft verified, a clean step, and a few drafts where the batch is small.
            steps = max(3, min(8, -(-8 // load.batch)))
            price = steps * max(0.0, 1.0 - goodput[arm] / goodput[now]) + 0.05
            if price > self._allowance and self._probes > 0:
                continue
            self._allowance -= price
            self._probe_arm, self._probe_left = arm, steps
            self._probes += 1
            break
        else:
            return False
        self._next_probe = self._steps + self._interval
        self._interval = min(2 * self._interval, self._set.probe_interval_max)
        return True
