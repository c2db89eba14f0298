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

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_tlt.speculation.acceptance import AcceptanceEstimate
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies.base import BasePolicy
from verl_tlt.speculation.prober import Probe, ProbeBudget, Prober, Proposal, Situation
from verl_tlt.speculation.types import OFF, Load, StepRecord

_GROWTH = 1.25
"""A batch that grew by this factor in one step is a new situation."""
_BEYOND = 1.5
"""An arm may be used at batches up to this many times the largest at which it was measured."""
_LOOK_EVERY = 8
"""Steps between two looks for something worth probing."""
_SAME_LOAD = 1.0 / 32.0
"""Relative change of the batch up to which what was prepared for the last step's load serves the next."""
_DEAREST_CHANGE = 1.0
"""Steps a change of K may be believed to cost; prefills that join can make it look dearer."""


@dataclass(frozen=True)
class GoodputSettings:
    """Constants of the goodput policy."""

    switch_price: float = 0.2
    """What a change of K costs at least, in steps; what it is measured to cost beyond two steady halves is added.
    K changes once staying has lost as much by the estimates."""
    on_gain: float = 0.01
    """Relative goodput over K=0 that drafting must promise before it starts."""
    off_gain: float = 0.0
    """Relative goodput over K=0 below which drafting stops."""
    hold: int = 4
    """Steps a new K is kept: the first verifies the old one, the others measure the new."""
    probe_share: float = 0.004
    """Share of the engine's time that probing may cost."""
    probe_interval: int = 64
    """Steps between probes; doubles after each probe that changed nothing."""
    probe_interval_max: int = 512
    """Where the doubling ends: how late a drafter that became useful is noticed at worst, in engine steps."""
    optimism: float = 1.25
    """Standard deviations by which an arm's estimate is stretched to see whether a probe could pay."""


class GoodputPolicy(BasePolicy):
    """Maximises expected tokens per second at the load at hand."""

    def __init__(self, arms: Sequence[int], settings: GoodputSettings | None = None) -> None:
        super().__init__()
        self._arms = tuple(arms)
        self._set = settings or GoodputSettings()
        self.acceptance = AcceptanceEstimate(self._arms[-1])
        self.latency = LatencyModel(self._arms)
        self._current = 0
        self._held = 0
        self._batch = 0
        self._steps = 0
        self._regret = 0.0
        budget = ProbeBudget(self._set.probe_share, self._set.probe_interval, self._set.probe_interval_max)
        self._prober = Prober(self._arms, self.acceptance, self.latency, budget, self._set.optimism)
        self._probe = Probe(0, 0)
        self._switches = 0
        self._surcharges: deque[float] = deque(maxlen=15)
        self._surcharge = 0.0
        self._used: Counter[int] = Counter()
        self._ready: Situation | None = None
        self._idea: Proposal | None = None

    def decide(self, load: Load) -> int:
        """K for the coming step: the probe in progress, else the argmax with hysteresis."""
        if load.batch > _GROWTH * self._batch:
            # A new rollout began: what was decided for the tail of the last one does not bind.
            self._probe, self._held = Probe(0, 0), 0
        self._batch = load.batch
        if self._probe.steps > 0:
            return self._probe_on()
        if self._held > 0:
            self._held -= 1
            return self._arms[self._current]
        here = self._ready
        if here is None or abs(here.load.batch - load.batch) > _SAME_LOAD * load.batch:
            self.prepare(load)
            here = self._ready
        self._ready = None
        if here is None:
            return self._arms[0]
        if here.best == self._current:
            self._regret = 0.0
        else:
            self._move(here.goodput, here.best, load.batch)
        idea = self._idea
        if idea is not None and here.current == self._current and self._prober.budget.spend(idea.subject, idea.price):
            self._probe = idea.probe
            return self._probe_on()
        return self._arms[self._current]

    def learn(self, step: StepRecord) -> None:
        """Learn acceptance from any verified draft and latency from clean steady steps."""
        if step.drafted != OFF:
            self._steps += 1
            self._prober.budget.step()
            self._used[step.drafted] += 1
        if step.num_drafts > 0 and step.verified > 0:
            self.acceptance.observe(step.num_drafts, step.num_accepted_tokens_per_pos)
            self._prober.looked()
        else:
            self.acceptance.skip(step.batch)
        if not step.clean:
            self._learn_surcharge(step)
            return
        if step.drafted in (OFF, step.verified):
            self.latency.observe(step.batch, step.kv_tokens, step.drafted, step.latency_s)

    def prepare(self, load: Load) -> None:
        """Work out what every arm promises at a load; `choose` for about the same load then only has to compare."""
        self._ready, self._idea = None, None
        if self._probe.steps > 0 or self._held > 0 or load.batch <= 0:
            return
        seconds = self.latency.predict(load.batch, load.kv_tokens)[1:]
        if seconds[0] <= 0.0:
            return
        tau = self.acceptance.accept_lengths()
        goodput = [tau[k] / s for k, s in zip(self._arms, seconds, strict=True)]
        reachable = self._reachable(load.batch)
        best = max(range(reachable), key=goodput.__getitem__)
        self._ready = Situation(load, self._current, reachable, seconds, goodput, best)
        if self._steps % _LOOK_EVERY == 0:
            self._idea = self._prober.find(self._ready, self._surcharge)

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """A new drafter with this expected acceptance per position: start from it and look again soon."""
        self.acceptance.set_prior(conditional, weight=24.0)
        self._prober.budget.clear()

    def set_latency(self, table: LatencyTable) -> None:
        """Seed the latency model from a calibration or an earlier run."""
        self.latency.seed(table)

    def summary(self) -> dict[str, Any]:
        """What was learned and done so far, JSON-able."""
        steps = max(self._used.total(), 1)
        return {
            "policy": "goodput",
            "draft_length_share": {str(k): self._used[k] / steps for k in self._arms},
            "conditional_acceptance": self.acceptance.conditional(),
            "probes": self._prober.budget.count,
            "probe_steps": self._prober.budget.spent,
            "switch_surcharge_steps": self._surcharge,
            "switches": self._switches,
        }

    def _probe_on(self) -> int:
        self._probe = self._probe._replace(steps=self._probe.steps - 1)
        return self._arms[self._probe.arm]

    def _reachable(self, batch: int) -> int:
        """Arms that may be chosen: no unmeasured draft length is reached by jumping over another.

        A measurement at a larger batch counts, because it bounds the latency here from above. Where K=0 itself was
        never measured it comes first: compared with a guess, drafting can look good for the whole of a rollout's start.
        """
        if self.latency.largest_batch(self._arms[0]) * _BEYOND < batch:
            return 1
        last = 0
        for arm, k in enumerate(self._arms):
            if self.latency.largest_batch(k) * _BEYOND >= batch:
                last = arm
        return min(last + 2, len(self._arms))

    def _move(self, goodput: Sequence[float], best: int, batch: int) -> None:
        """Change K once staying has cost, by the estimates, what a change costs."""
        now = self._current
        lead = goodput[best] / goodput[now] - 1.0
        if now == 0:
            lead -= self._set.on_gain
        elif best == 0:
            lead += self._set.off_gain
        if lead <= 0.0:
            self._regret = 0.0
            return
        self._regret += lead
        if self._regret >= self._set.switch_price + self._surcharge:
            self._current, self._held, self._regret = best, self._set.hold - 1, 0.0
            self._switches += 1
            self._prober.news(now, best, batch=batch)

    def _learn_surcharge(self, step: StepRecord) -> None:
        """What a change of K cost beyond half a step of each kind, in steps.

        The lower quartile of the latest changes, because a prefill that joins makes a change look dear.
        """
        between_arms = {step.verified, step.drafted} <= set(self._arms)
        if step.batch <= 0 or step.verified == step.drafted or not between_arms:  # none decode in a step of prompts
            return
        cost = self.latency.predict(step.batch, step.kv_tokens)[1:]
        usual = 0.5 * (cost[self._arms.index(step.verified)] + cost[self._arms.index(step.drafted)])
        if usual > 0.0:
            self._surcharges.append(step.latency_s / usual - 1.0)
            quartile = sorted(self._surcharges)[len(self._surcharges) // 4]
            self._surcharge = max(0.0, min(quartile, _DEAREST_CHANGE))
