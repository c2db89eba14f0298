"""The policies that choose K for an engine step, by name in `tlt.speculation.policy`.

The default one, goodput, drafts the length with the highest expected goodput, argmax τ(K) / T(batch, kv, K). One
verified draft shows the acceptance of every shorter length, and latency hardly changes, so little is explored: a draft
length whose estimate is uncertain or old is *probed* (`prober.py`). K=0 is an ordinary length. K changes only once the
loss of staying adds up to the price of a change, and not again within a few steps (vLLM issue 49548: changing it at a
threshold in every step costs more than either side of it).
"""

from collections.abc import Sequence

from verl_tlt.speculation.acceptance import AcceptanceEstimate, expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.prober import LoadEstimates, Probe, ProbeBudget, find_probe
from verl_tlt.speculation.types import OFF, ControlError, Load, Policy, Step

POLICIES = ("goodput", "table", "fixed", "off")
"""Names `make_policy` knows."""
SWITCH_PRICE = 0.2
"""Price of a change of K, in steps: K changes once staying has lost as much by the estimates."""
ON_GAIN = 0.01
"""Relative goodput over K=0 that drafting must promise before it starts."""
HOLD = 4
"""Steps a new K is kept: the first verifies drafts of the old one, the others measure the new."""
PRIOR_DRAFTS = 24.0
"""Drafts that a new drafter's expected acceptance counts as."""
_GROWTH = 1.25
"""A batch that grew by this factor in one step belongs to a new rollout."""
_BEYOND = 1.5
"""A draft length may be used at batches up to this many times the largest at which it was measured."""
_PROBE_EVERY = 8
"""Steps between two searches for a probe."""
_SAME_LOAD = 1.0 / 32.0
"""Relative change of the batch up to which estimates prepared for the last step's load serve the next."""


class GoodputPolicy(Policy):
    """Maximises expected tokens per second at the load at hand; `active_share` as in `Roofline`."""

    def __init__(self, lengths: Sequence[int], active_share: float = 1.0) -> None:
        self._lengths = tuple(lengths)
        self.acceptance = AcceptanceEstimate(self._lengths[-1])
        self.latency: LatencyModel = LatencyModel(self._lengths, active_share=active_share)
        self._current = 0
        self._held = 0
        self._lost = 0.0
        """Estimated regret, in steps, of keeping the current K."""
        self._batch = 0
        self._steps = 0
        self._budget = ProbeBudget()
        self._probe = Probe(0, 0)
        """The probe in progress; its `steps` are those left."""
        self._prepared: LoadEstimates | None = None
        self._candidate: Probe | None = None

    def choose(self, load: Load) -> int:
        """K for the coming step: that of the probe in progress, else the argmax with hysteresis."""
        if load.batch > _GROWTH * self._batch:
            # A probe and a K that were chosen for the end of the last rollout do not hold for the next.
            self._probe, self._held = Probe(0, 0), 0
        self._batch = load.batch
        if self._probe.steps > 0:
            return self._probe_on()
        if self._held > 0:
            self._held -= 1
            return self._lengths[self._current]
        here = self._prepared
        if here is None or abs(here.load.batch - load.batch) > _SAME_LOAD * load.batch:
            self.prepare(load)
            here = self._prepared
        self._prepared = None
        if here is None:
            return self._lengths[0]
        self._move(here)
        probe = self._candidate
        if probe and here.current == self._current and self._budget.spend(probe.subject, probe.price):
            self._probe = probe
            return self._probe_on()
        return self._lengths[self._current]

    def observe(self, step: Step) -> None:
        """Learn acceptance from any verified draft and latency from clean steady steps."""
        if step.drafted != OFF:
            self._steps += 1
            self._budget.step()
        if step.num_drafts > 0 and step.verified > 0:
            self.acceptance.observe(step.num_drafts, step.num_accepted_tokens_per_pos)
            self._budget.drafted()
        else:
            self.acceptance.skip(step.batch)
        if step.clean and step.drafted in (OFF, step.verified):
            self.latency.observe(step.batch, step.kv_tokens, step.drafted, step.latency_s)

    def prepare(self, load: Load) -> None:
        """Estimate the goodput of all draft lengths at a load; `choose` for about the same load then only compares."""
        self._prepared, self._candidate = None, None
        if self._probe.steps > 0 or self._held > 0 or load.batch <= 0:
            return
        seconds = self.latency.predict(load.batch, load.kv_tokens)[1:]
        if seconds[0] <= 0.0:
            return
        tau = self.acceptance.accept_lengths
        goodput = [tau[k] / s for k, s in zip(self._lengths, seconds, strict=True)]
        reachable = self._reachable(load.batch)
        best = max(range(reachable), key=goodput.__getitem__)
        self._prepared = LoadEstimates(load, self._current, reachable, seconds, goodput, best)
        if self._steps % _PROBE_EVERY == 0:
            self._candidate = find_probe(self._prepared, self._lengths, self.acceptance, self.latency, self._budget)

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        self.acceptance.set_prior(conditional, weight=PRIOR_DRAFTS)
        self._budget.clear()

    def set_latency(self, table: LatencyTable) -> None:
        self.latency.seed(table)

    def _probe_on(self) -> int:
        self._probe = self._probe._replace(steps=self._probe.steps - 1)
        return self._lengths[self._probe.choice]

    def _reachable(self, batch: int) -> int:
        """How many lengths may be chosen: those measured near this batch or at a larger one, and one more; 0 first."""
        if self.latency.largest_batch(self._lengths[0]) * _BEYOND < batch:
            return 1
        last = 0
        for choice, k in enumerate(self._lengths):
            if self.latency.largest_batch(k) * _BEYOND >= batch:
                last = choice
        return min(last + 2, len(self._lengths))

    def _move(self, here: LoadEstimates) -> None:
        """Change K once staying has lost what a change costs."""
        lead = here.goodput[here.best] / here.goodput[self._current] - 1.0 - (ON_GAIN if self._current == 0 else 0.0)
        self._lost = self._lost + lead if lead > 0.0 else 0.0
        if self._lost >= SWITCH_PRICE:
            self._budget.k_changed((self._current, here.best), here.load.batch)
            self._current, self._held, self._lost = here.best, HOLD - 1, 0.0


class FixedPolicy(Policy):
    """Always the same K (0: the policy `off`)."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def choose(self, load: Load) -> int:
        return self._draft_length


class TablePolicy(Policy):
    """argmax τ(K) / T(batch, kv, K) over a measured table and a given acceptance; without both it drafts nothing."""

    def __init__(self, lengths: Sequence[int], active_share: float = 1.0) -> None:
        self._lengths, self._active_share = tuple(lengths), active_share
        self._usable: tuple[int, ...] = (0,)
        self._latency: LatencyModel | None = None
        self._tau: Sequence[float] | None = None

    def choose(self, load: Load) -> int:
        if self._latency is None or self._tau is None:
            return 0
        tau, seconds = self._tau, self._latency.predict(load.batch, load.kv_tokens)[1:]
        return max(zip(self._usable, seconds, strict=True), key=lambda length: tau[length[0]] / length[1])[0]

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        self._tau = expected_accept_lengths(conditional, self._lengths[-1])

    def set_latency(self, table: LatencyTable) -> None:
        measured = set(table.lengths())
        self._usable = tuple(k for k in self._lengths if k in measured)
        model = LatencyModel(self._usable, table=table, active_share=self._active_share) if 0 in self._usable else None
        self._latency = model


def make_policy(name: str, lengths: tuple[int, ...], fixed: int | None = None, active_share: float = 1.0) -> Policy:
    """Build one of `POLICIES` for ascending draft lengths; a ControlError names what it cannot be built with.

    `fixed` is the K of policy "fixed", None: the longest; `active_share` as in `Roofline`.
    """
    if name == "goodput":
        return GoodputPolicy(lengths, active_share)
    if name == "table":
        return TablePolicy(lengths, active_share)
    if name == "off":
        return FixedPolicy(0)
    if name != "fixed":
        raise ControlError(f"Speculation policy {name!r} does not exist; known: {', '.join(POLICIES)}.")
    draft_length = lengths[-1] if fixed is None else fixed
    if draft_length not in lengths:
        raise ControlError(f"Speculation setting fixed={draft_length} is none of the draft lengths {list(lengths)}.")
    return FixedPolicy(draft_length)
