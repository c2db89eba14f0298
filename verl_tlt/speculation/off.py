"""Does drafting pay? Decided between rollouts, from the calibrated step costs and the last rollout's batches.

OFF skips the drafter's own pass too, which K=0 does not. It holds for a whole rollout, because the drafter's KV cache
must have no holes. The draft length of each step is decided in the engine (`step_control.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from verl_tlt.messages.rollout import EngineStats, accept_length
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF

CLEARLY = 0.03
"""Share of the decoding time that drafts must save before drafting is switched on; less may be noise."""
BETTER = 1.05
"""A new drafter is tried at once if its held-out accept length is this many times that of the one that did not pay."""
IN_A_ROW = 3
"""Rollouts in a row that drafting made slower before it is switched off."""
FEWEST_STEPS = 100
"""Engine steps with the drafter's pass from which on a rollout counts: fewer may all be disturbed ones."""
FIRST_WAIT = 8
"""Rollouts before one replica tries again; each further wait is twice the one before it."""
LONGEST_WAIT = 64
"""Most rollouts between two tries."""


def saved_estimate_s(stats: Mapping[str, EngineStats]) -> float | None:
    """Estimated seconds by which a rollout ended earlier than without drafts; None where an engine has no figures.

    By its step costs an engine that decoded for `decode_s` would have taken `undrafted_s` without drafts. The slowest
    engine ends the rollout, so the longest time of all engines counts. A rollout without any draft cannot have saved
    time: its estimate is 0 at most.
    """
    if any(s.failure is not None for s in stats.values()):
        return None
    if not any(map(_steps_with_drafter, stats.values())):
        return 0.0
    saved_s = max(s.undrafted_s for s in stats.values()) - max(s.decode_s for s in stats.values())
    return saved_s if any(s.num_drafts for s in stats.values()) else min(0.0, saved_s)


def expected_saving(
    costs: LatencyTable, acceptance: Sequence[float], work: Mapping[int, float], context: float
) -> float:
    """Share of the decoding time without drafts that the best K of each batch is expected to save.

    `acceptance` is conditional, by draft position; `work`: tokens by batch; `context`: tokens of context of a request.
    """
    tau = expected_accept_lengths(acceptance, costs.lengths()[-1])
    off_s = drafted_s = 0.0
    for batch, tokens in work.items():
        off_step_s = float(costs.seconds(OFF, batch, context))
        per_token_s = []  # of a request, by K
        for k in costs.usable(batch):
            if k >= 0:
                # A step with the drafter never takes less than one without: where it was measured so, that was noise.
                step_s = max(off_step_s, float(costs.seconds(k, batch, context)))
                per_token_s.append(step_s / tau[k])
        off_s += tokens / batch * off_step_s
        drafted_s += tokens / batch * min(per_token_s, default=off_step_s)
    return 1.0 - drafted_s / off_s


def _steps_with_drafter(stats: EngineStats) -> int:
    """Engine steps in which the drafter ran, with K=0 too."""
    return sum(steps for k, steps in stats.steps_by_draft_length.items() if k != OFF)


class OffDecision:
    """Which replicas draft in the coming rollout.

    No replica drafts if drafts are expected to save too little, unless the last rollout with drafts gained. Nor does
    one once drafts have made some rollouts slower. In both cases one replica tries again now and then.

    With the policy "fixed" and with n-grams (`source`) all replicas always draft.
    """

    def __init__(self, replicas: Sequence[str], policy: str, source: str = "eagle") -> None:
        self.never = ""
        """Why the drafter runs in no rollout of this run; empty: it may."""
        self.cause = ""
        """Why drafting is switched off after rollouts that it made slower; empty: it is not."""
        self.against = ""
        """Why no replica drafts in the coming rollout; empty: one does."""
        self.replicas = list(replicas)
        """In the order in which they try."""
        self._always = policy == "fixed" or source != "eagle"
        self._by_costs = policy == "live_table" and source == "eagle"
        self._costs: LatencyTable | None = None
        self._work: Mapping[int, float] = {}  # tokens by batch, in the last rollout
        self._context = 0.0  # tokens of context of a request, in the last rollout
        self._gained = False  # in the last rollout with drafts
        self._slower = 0  # rollouts in a row
        self._accept_length = 1.0  # held out, of the drafter that is served
        self._accept_length_last_try = 1.0  # of the drafter that did not pay, or was tried last
        self._wait = 0  # rollouts between two tries; 0: all replicas draft
        self._next_try_in = 0  # rollouts
        self._tries = 0
        self._trying: str | None = None  # the replica that tries in this rollout

    @property
    def knows_costs(self) -> bool:
        """Whether a step without the drafter was measured; else nobody knows what drafts save."""
        return self._costs is not None

    def calibrated(self, costs: LatencyTable, most_requests: int | None = None) -> str | None:
        """Take note of measured step costs; without a figure for OFF they say nothing.

        In a rollout a replica has at most `most_requests` at once; None: not known. Returns what the user is to be
        told; None: nothing.
        """
        self._costs = None
        self._work = {}
        nothing_measured = not costs.lengths()
        no_draft_measured = False
        if OFF in costs.lengths():
            self._costs = costs
            # Until a rollout has ended, each batch that was calibrated, and that a rollout can have, is assumed to be
            # decoded for the same time.
            measured = {p.batch for p in costs.points}
            largest = most_requests or max(measured)
            batches = sorted({min(batch, largest) for batch in measured})
            self._work = {batch: batch / float(costs.seconds(OFF, batch, 0.0)) for batch in batches}
            no_draft_measured = costs.lengths()[-1] <= 0
        without_drafts = (nothing_measured and self._by_costs) or (no_draft_measured and not self._always)
        if self.never or not without_drafts:
            return None
        self.never = "no step with a draft was measured at start"
        return f"Nothing is drafted in this run: {self.never}."

    def drafting(self, acceptance: Sequence[float]) -> list[str]:
        """Replicas that draft in the coming rollout; a drafter of which nothing is known is tried.

        `acceptance` is held out, conditional, by draft position, in 0..1 (else ControlError); empty: unknown.
        """
        self._accept_length = expected_accept_lengths(acceptance, len(acceptance))[-1] if acceptance else 1.0
        # A drafter that is clearly better is judged anew, by costs alone.
        if self._wait and self._accept_length > BETTER * self._accept_length_last_try:
            self.cause = ""
            self._wait = 0
        self._trying = None
        if self.never:
            self.against = self.never
            return []
        self.against = "" if self._always else self.cause or self._why_not(acceptance)
        if not self.against:
            self._wait = 0
            return self.replicas
        if not self._wait:
            self._begin_to_wait()
        is_random_head = bool(acceptance) and not any(acceptance)
        if self._next_try_in > 0 or is_random_head:
            return []
        self.against = ""
        self._trying = self.replicas[self._tries % len(self.replicas)]
        return [self._trying]

    def _begin_to_wait(self) -> None:
        self._accept_length_last_try = self._accept_length
        self._slower = 0
        self._wait = self._next_try_in = FIRST_WAIT

    def _why_not(self, acceptance: Sequence[float]) -> str:
        """Why the table says OFF, with the figure; empty: it does not, or a rollout has shown that drafts pay."""
        if not acceptance or self._costs is None or self._gained:
            return ""
        saving = expected_saving(self._costs, acceptance, self._work, self._context)
        if saving > CLEARLY:
            return ""
        return f"with a held-out accept length of {self._accept_length:.2f} drafts are expected to save {saving:.0%}"

    def rollout_ended(self, stats: Mapping[str, EngineStats]) -> str | None:
        """Take note of a rollout, by each replica's sums; returns what the user is to be told, None: nothing new."""
        self._note_load(stats)
        ran = [s for s in stats.values() if _steps_with_drafter(s) >= FEWEST_STEPS]
        undrafted_s = sum(s.undrafted_s for s in ran)
        gain = 1.0 - sum(s.decode_s for s in ran) / undrafted_s if undrafted_s else 0.0
        if self._trying is not None:
            return self._tried(stats.get(self._trying, EngineStats()), gain)
        if self._wait:
            self._next_try_in -= 1
            return None
        if ran:
            self._gained = gain > 0.0
            self._slower = self._slower + 1 if gain < 0.0 else 0
        if self._slower < IN_A_ROW or self._always:
            return None
        self.cause = "no draft length makes up for what the drafter costs at these batches"
        if drafts := sum(s.num_drafts for s in ran):
            accepted = accept_length(sum(sum(s.num_accepted_tokens_per_pos) for s in ran), drafts)
            self.cause += f", with an accept length of {accepted:.2f}"
        self._begin_to_wait()
        return f"Drafting is switched off after {IN_A_ROW} rollouts that it made slower: {self.cause}."

    def _note_load(self, stats: Mapping[str, EngineStats]) -> None:
        """Keep this rollout's tokens by batch and mean context, so far as it has any, for the next expectation."""
        work: Counter[int] = Counter()
        for s in stats.values():
            work.update(s.tokens_by_batch)
        work = +work  # without batches that decoded nothing
        if work:
            self._work = work
        contexts = [s.mean_context for s in stats.values() if s.mean_context]
        if contexts:
            self._context = sum(contexts) / len(contexts)

    def _tried(self, one: EngineStats, gain: float) -> str | None:
        """Take note of a rollout in which `one` replica tried; returns as `rollout_ended`."""
        self._tries += 1
        if not (one.num_steps or one.failure):  # it slept: another one will try
            return None
        if gain > CLEARLY:
            self.cause = ""
            self._gained = True
            self._wait = 0
            return f"Drafting is switched on again: a replica that tried saved {gain:.0%} of its decoding time."
        self._next_try_in = self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._accept_length_last_try = self._accept_length
        return None
