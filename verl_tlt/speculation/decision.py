"""Does drafting pay? What is decided about speculation between rollouts, as pure functions of numbers.

* Before every rollout: whether the drafter runs in it (`RolloutDecision`). OFF skips the drafter's own pass too, which
  K=0 does not; that can be had for a whole rollout only, because the drafter's KV cache must have no holes.
* After every rollout: whether speculation is disabled for the run, or enabled again after a probe (`RunDecision`).

The draft length of each step is decided in the engine (`step_control.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from verl_tlt.messages.rollout import EngineStats, accept_length
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import CONTEXT_TOKENS, LatencyTable
from verl_tlt.speculation.types import OFF

USELESS = 1.05
"""Accept length up to which a drafter only costs: a draft token takes more than 5 % of a step everywhere."""
CLEARLY = 0.03
"""Share of the decoding time without drafts that must be saved or lost to count; less may be noise."""
UNTRIED = 0.10
"""`CLEARLY` while no drafter was tried in this run: the estimate then rests on short contexts and older text alone. For
less, one replica tries."""
BETTER = 1.05
"""While speculation is disabled, a drafter that promises an accept length this many times as long is tried at once."""
IN_A_ROW = 3
"""Rollouts in a row that lose time, or have hardly a draft accepted, before speculation is disabled."""
FEWEST_DRAFTS = 100
"""Drafts in a rollout from which on its accept length counts: where 15 % are accepted, fewer than 6 of 100 are in one
rollout of 600. Drafts and not steps: in a long tail, or where K=0 is mostly better, few steps draft."""
FIRST_WAIT, LONGEST_WAIT = 8, 64
"""RL steps before what was given up (speculation, a replica's spot training) is tried again, and between two tries at
most; each wait is twice the one before it."""


def expected_saving(acceptance: Sequence[float], costs: LatencyModel, work: Mapping[int, float]) -> float:
    """Share of OFF's decoding time that drafting is expected to save, with the best draft length at each batch.

    `acceptance` is conditional, by position; `costs` are asked at the calibration's contexts; `work`: tokens by batch.
    """
    lengths = costs.lengths[1:]
    tau = expected_accept_lengths(acceptance, lengths[-1])
    drafted_s = off_s = 0.0
    for batch, tokens in work.items():
        off, *drafting = costs.predict(batch, batch * CONTEXT_TOKENS)
        seconds = tokens / batch * off
        # A step with a drafter never takes less than one without; where it was measured so, that was noise.
        drafted_s += seconds * min(max(s / off, 1.0) / tau[k] for k, s in zip(lengths, drafting, strict=True))
        off_s += seconds
    return 1.0 - drafted_s / off_s


class RolloutDecision:
    """Judges a drafter by held-out acceptance, step costs and the last rollout's batches.

    The policy "fixed" is an order; n-grams (`source`) draft whatever a drafter is worth. `active_share` as in
    `Roofline`; `arms`: `tlt.speculation.arms`.
    """

    def __init__(
        self, policy: str, source: str = "eagle", active_share: float = 1.0, arms: Sequence[int] | None = None
    ) -> None:
        self._active_share = active_share
        self._always = policy == "fixed" or source != "eagle"
        self.never = "tlt.speculation.policy=off" if policy == "off" else ""
        """Why the drafter runs in no rollout; empty: it may."""
        if arms is not None and not any(arms) and not self._always:
            self.never = self.never or f"tlt.speculation.arms={list(arms)}"
        self._costs: LatencyModel | None = None
        self._longest = 0  # draft length that was measured; 0: none
        self._work: Mapping[int, float] = {}  # tokens by batch in the last rollout
        self._even: Mapping[int, float] = {}  # of one that spends as long at each measured batch: evenly in log scale
        self._acceptance: Sequence[float] = ()
        self._tried = False
        self.against = ""
        """Why `drafts` said no when it was asked last; empty: it said yes."""

    def calibrated(self, table: LatencyTable) -> None:
        """Take note of measured step costs; without a figure for OFF, or for any draft length, they say nothing."""
        lengths = table.lengths()
        self._longest = max(0, *lengths) if lengths else 0
        self._costs = None
        if OFF in lengths and lengths[-1] >= 0:
            drafting = [k for k in lengths if k >= 0]
            self._costs = LatencyModel(drafting, table=table, active_share=self._active_share)
            batches = [batch for batch, _ in table.by_batch(OFF)]
            if not self._longest and not self._always:
                self.never = self.never or "no step with a draft was measured at start (see tlt.speculation.arms)"
            self._even = {b: b / self._costs.seconds(b, b * CONTEXT_TOKENS, OFF) for b in batches}

    def drafts(self, acceptance: Sequence[float], tried: bool = False) -> bool:
        """Whether the drafter runs in the coming rollout; one of which nothing is known is tried.

        `acceptance` is held out, conditional, by draft position, in 0..1 (else ControlError); empty: unknown.
        """
        self._acceptance = acceptance
        self.against = self.never or ("" if self._always else self._why_not(tried))
        return not self.against

    def _why_not(self, tried: bool) -> str:
        """Why the drafter does not run, with figures; empty: it runs."""
        if not self._acceptance:
            return ""
        if self.promise() <= USELESS:
            return f"held-out accept length {self.promise():.2f}: next to nothing is accepted"
        if self._costs is None or self.saving(self._acceptance, tried) > 0.0:
            return ""
        tau, even = self._nearest(self._costs)
        least = CLEARLY if self._tried or tried else UNTRIED
        return f"held-out accept length {tau:.2f}, and drafts pay from {even / (1.0 - least):.2f} on"

    def _nearest(self, costs: LatencyModel) -> tuple[float, float]:
        """Held-out and break-even accept length of the draft length that comes closest to paying at all times."""
        lengths, work = costs.lengths[1:], self._work or self._even
        steps = {b: (n / b, costs.predict(b, b * CONTEXT_TOKENS)) for b, n in work.items()}
        off_s = sum(n * off for n, (off, *_) in steps.values())
        tau = expected_accept_lengths(self._acceptance, lengths[-1])
        even = [sum(n * max(s[i], s[0]) for n, s in steps.values()) / off_s for i in range(1, len(lengths) + 1)]
        return max(((tau[k], even[i]) for i, k in enumerate(lengths) if k > 0), key=lambda pair: pair[0] / pair[1])

    def saving(self, acceptance: Sequence[float], tried: bool = False) -> float:
        """Share of the decoding time that drafting is expected to save; 0: too little (less if `tried`), or unknown."""
        if self._costs is None or not acceptance:
            return 0.0
        saving = expected_saving(acceptance, self._costs, self._work or self._even)
        return saving if saving > (CLEARLY if self._tried or tried else UNTRIED) else 0.0

    def learn(self, stats: Iterable[EngineStats], gain: float | None) -> None:
        """Take note of a rollout by its engines' sums and its gain (`savings.Savings.gain`)."""
        self._work = +sum((Counter(s.tokens_by_batch) for s in stats), Counter[int]()) or self._work
        self._tried = self._tried or gain is not None

    def promise(self) -> float:
        """Held-out accept length at the longest draft; 1 of an unknown drafter."""
        longest = self._longest or len(self._acceptance)
        return expected_accept_lengths(self._acceptance, longest)[-1] if self._acceptance else 1.0


class RunDecision:
    """Which replicas draft, rollout after rollout.

    After a rollout that drafting made slower one replica tries again. Several such rollouts in a row, or in which
    drafts are hardly ever accepted, disable speculation; then one replica drafts as a probe in rarer and rarer
    rollouts and with a `BETTER` drafter, and if it gains, it is enabled again.
    With the policy "fixed" drafting is an order; n-grams (`source`) that match nothing cost nothing.
    """

    def __init__(
        self,
        replicas: Sequence[str],
        policy: str = "goodput",
        source: str = "eagle",
        active_share: float = 1.0,
        arms: Sequence[int] | None = None,
    ) -> None:
        self.cause = ""
        """Why speculation is disabled for the run; empty: it is not."""
        self.rollout = RolloutDecision(policy, source, active_share, arms)
        self._replicas, self._has_drafter, self._ordered = list(replicas), source == "eagle", policy == "fixed"
        self._useless = self._losing = 0
        self._wait = self._until = 0  # rollouts between two probes, and to the next one
        self._promised = 0.0  # accept length with which it was disabled, or probed last
        self._turn = 0  # of the replica that drafts alone

    def drafting(self, acceptance: Sequence[float]) -> list[str]:
        """Replicas that draft in the coming rollout; argument and error as in `RolloutDecision.drafts`."""
        worth, one = self.rollout.drafts(acceptance), [self._replicas[self._turn % len(self._replicas)]]
        if self.cause:
            if worth and self.rollout.promise() > BETTER * self._promised:
                self._until = 0
            return [] if self._until > 0 else one
        if worth and not self._losing:
            return self._replicas
        return one if self.rollout.drafts(acceptance, tried=True) else []  # until a gain is known, or after a loss

    def learn(self, stats: Mapping[str, EngineStats], gain: float | None) -> str | None:
        """Take note of a rollout; returns what the user is to be told, None: nothing new.

        `stats` are the sums by replica, `gain` as `RolloutDecision.learn` has it.
        """
        self.rollout.learn(stats.values(), gain)
        drafts = sum(s.num_drafts for s in stats.values())
        accepted = accept_length(sum(sum(s.num_accepted_tokens_per_pos) for s in stats.values()), drafts)
        drafted = drafts >= FEWEST_DRAFTS
        useless = drafted and self._has_drafter and accepted <= USELESS
        if self.cause:
            return self._after_probe(drafted and not useless, gain or 0.0)
        lost = gain is not None and gain < -CLEARLY
        if gain is None or lost:
            self._turn += 1  # this one may be unable to draft, or slow
        if drafted:
            self._useless = self._useless + 1 if useless else 0
        if gain is not None:
            self._losing = self._losing + 1 if lost and not self._ordered else 0
        why = f"an accept length of {accepted:.2f} does not make up for what drafting costs at these batches"
        if self._useless >= IN_A_ROW:
            why = (
                f"next to nothing that is drafted is accepted (accept length {accepted:.2f}): a drafter of another "
                "policy or of other aux layers, or stale weights (tlt/reload_failures)"
            )
        if self._ordered:
            return f"Drafting goes on as ordered, although {why}." if useless and self._useless == IN_A_ROW else None
        if max(self._useless, self._losing) < IN_A_ROW:
            return None
        self.cause, self._useless, self._losing = why, 0, 0
        self._wait, self._until, self._promised = FIRST_WAIT, FIRST_WAIT, self.rollout.promise()
        return f"Speculation is disabled after {IN_A_ROW} rollouts that it made slower: {why}."

    def _after_probe(self, accepted: bool, gain: float) -> str | None:
        """While disabled: a rollout is over, perhaps a probe's that brought evidence."""
        self._until -= 1
        if self._until >= 0:
            return None
        self._turn += 1
        if accepted and gain > CLEARLY:
            self.cause = ""
            return f"Speculation is enabled again: a replica that drafted as a probe saved {gain:.0%} of its decoding."
        self._until = self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._promised = self.rollout.promise()
        return None
