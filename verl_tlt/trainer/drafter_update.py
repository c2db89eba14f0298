"""Between two rollouts: judge the candidate, export it if it is to be served, and merge what the sessions trained.

Runs in a background thread while old log-probs and the actor update run, with the weight sync as its deadline: after a
late one the engines keep what they serve for another step. The workers do the arithmetic on the host, for the actor has
the devices by then. The scores come with the sessions, and are of the candidate that was merged before these: it is
judged one step after it was merged.

The gate (`decide`) compares drafters by accept length at the same held-out positions, because accept length differs far
more between sequences than between drafters. Positions of one sequence resemble each other, and so do the responses to
one prompt: prompts are resampled, each with all of its sequences. Even so a difference of 1 % takes some 10k positions.

* revert where the candidate is surely worse by more than `WORSE` than the better of served and initial;
* publish where it is surely not worse than the served drafter by `margin` or more, and not seen to be worse than the
  initial one;
* hold otherwise: what is served stays, and the candidate trains on.

"Surely" means that a candidate on the wrong side of the border is published (reverted) with a chance of `ERROR` at
most. With too little to judge the decision is hold, unless the served drafter is hardly ever accepted or the candidate
is far better, as at the start of a run, when the drafter learns fastest and little is held out yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from verl_tlt.bootstrap import interval
from verl_tlt.config import GateConfig, TLTConfig
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, HeldOutScores, MergeVerdict
from verl_tlt.trace.events import Session
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.waits import CallFailed

if TYPE_CHECKING:
    from verl_tlt.trainer.spot_workers import Fleet

logger = logging.getLogger(__name__)

Action = Literal["publish", "hold", "revert_served", "revert_initial"]

ERROR = 0.01
"""Chance of a wrong publication or reversion at the border. A candidate is judged anew after every session, and one
lucky verdict publishes: at the usual level of 5 % a run of fifty sessions would have several."""
WORSE = 0.01
"""Share of the accept length by which a candidate must surely be worse to be given up; else it is trained on, and may
become better."""
NOTHING_TO_LOSE = 1.1
"""Below this accept length drafting costs more than it gains nearly anywhere: an unjudged candidate may replace it."""
FAR_BETTER = 0.2
"""Share by which an unjudged candidate must lead: ten standard errors of paired scores at `FEWEST` positions, so that
not even prompts that happen to suit one drafter explain it."""
FEWEST = 128
"""Fewest positions by which a candidate can be `FAR_BETTER`."""
MIN_PROMPTS = 7
"""Fewest prompts to judge by: six all favour one of two equal drafters with a chance above `ERROR` (2^-6 = 1.6 %)."""


class Decision(NamedTuple):
    action: Action
    reason: str
    interval: tuple[float, float] | None
    """Interval around (accept length of the candidate / of the served drafter) - 1; the truth lies beyond either end
    with a chance of `ERROR`. None: not judged."""


def decide(scores: HeldOutScores, config: GateConfig, *, seed: int) -> Decision:
    """Judge the candidate; the same scores and bootstrap `seed` give the same decision."""
    tau = scores.taus()
    best = "initial" if tau["initial"] > tau["served"] else "served"
    back: Action = "revert_initial" if best == "initial" else "revert_served"
    positions, prompts = int(scores.positions.sum()), len(np.unique(scores.prompts[scores.positions > 0]))
    interval: tuple[float, float] | None = None

    def decision(action: Action, reason: str) -> Decision:
        return Decision(action, f"{reason} ({positions} positions of {prompts} held-out prompts)", interval)

    if not np.isfinite(scores.candidate).all():
        return decision(back, "the candidate's scores are not finite")
    if positions < config.min_tokens or prompts < MIN_PROMPTS:
        if tau[best] < NOTHING_TO_LOSE:
            useless = f"the {best} drafter was useless, with an accept length of {tau[best]:.2f}"
            return decision("publish", f"unjudged: {useless}")
        lead = tau["candidate"] / tau[best] - 1.0
        if positions >= FEWEST and lead >= FAR_BETTER:
            return decision("publish", f"unjudged: {lead:.0%} better than the {best} drafter")
        return decision("hold", "too little to judge")

    interval = relative_interval(scores, "served", error=ERROR, seed=seed)
    # The better of two references is partly the luckier one: with two that differ, each gets half the error.
    references = 1 if np.array_equal(scores.served, scores.initial) else 2
    high = relative_interval(scores, best, error=ERROR / references, seed=seed)[1]
    if high < -WORSE:
        return decision(back, f"at least {-high:.2%} worse than the {best} drafter")
    if tau["candidate"] < tau["initial"] * (1.0 - config.margin):
        return decision("hold", f"{1.0 - tau['candidate'] / tau['initial']:.2%} worse than the initial drafter so far")
    if interval[0] > -config.margin:
        return decision("publish", f"within {interval[0]:+.2%} to {interval[1]:+.2%} of the served drafter")
    return decision("hold", f"perhaps {-interval[0]:.2%} worse than the served drafter")


def relative_interval(scores: HeldOutScores, against: str, *, error: float, seed: int) -> tuple[float, float]:
    """Interval of (accept length of the candidate / of `against`) - 1, missed with a chance of `error` on each side."""
    judged = scores.positions > 0
    prompts, prompt_of = np.unique(scores.prompts[judged], return_inverse=True)  # [P]; [S]: index into the former
    candidate, other = scores.of("candidate")[judged], scores.of(against)[judged]  # [S, 1+K]
    columns = (candidate.sum(axis=1), candidate[:, 0], other.sum(axis=1), other[:, 0], scores.positions[judged])
    rows = np.zeros((len(prompts), len(columns)))  # sums of a prompt's sequences
    np.add.at(rows, prompt_of, np.stack(columns, axis=1))

    def relative(sums: np.ndarray) -> np.ndarray:
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1.0

    positions = rows[:, 4]  # a few prompts can hold most positions
    return interval(rows, relative, error, seed, count=float(positions.sum() ** 2 / np.square(positions).sum()))


# ---------------------------------------------------------------------- what a run does with the decision

NOTHING = "no session trained"
OUTCOMES: dict[Action, tuple[Literal["published", "kept", "reverted"], Literal["candidate", "served", "initial"]]] = {
    "publish": ("published", "candidate"),
    "hold": ("kept", "served"),
    "revert_served": ("reverted", "served"),
    "revert_initial": ("reverted", "initial"),
}
"""By the gate's action: what becomes of the candidate, and the drafter that engines serve from then on."""


@dataclass(kw_only=True)
class DrafterUpdate(MergeVerdict):
    """What became of the candidate, and of a step's sessions."""

    drafter: DrafterFile | None = None  # the drafter to publish; None: nothing changes for the engines
    acceptance: list[float] = field(default_factory=list)
    """Conditional acceptance by draft position of whatever is served from now on."""
    excluded: dict[str, str] = field(default_factory=dict)  # worker -> why it is not in the merge
    failure: str = ""  # why exporting or merging failed; empty: neither did


class DrafterUpdates:
    """The updates of a run, one at a time in a background thread, and which drafter the engines should serve.

    Either half of an update may fail alone: what was exported is published although the merge failed, and what was not
    merged is handed in again later. Drafters are stored in the rollout's `dtype`.
    """

    def __init__(self, fleet: Fleet, config: TLTConfig, served: DrafterProvenance, dtype: str, log: StepLog) -> None:
        self._fleet, self._gate, self._dtype, self._log = fleet, config.gate, dtype, log
        self.served = served
        """The drafter that engines should serve."""
        self.since = 0
        """RL step in which `served` was published."""
        self.under_way: futures.Future[DrafterUpdate] | None = None
        """The update that is running, or has run and is not published yet; nobody trains meanwhile. None: neither."""
        self._pool = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="tlt-merge")

    def begin(self, sessions: Sequence[Session]) -> None:
        self.under_way = self._pool.submit(self.update, sessions)

    def update(self, sessions: Sequence[Session]) -> DrafterUpdate:
        """Judge what was merged before these sessions, export it if it is to be served, and merge what they trained."""
        clock = self._log.clock
        start, out = clock.monotonic(), DrafterUpdate(reason=NOTHING)
        scores = HeldOutScores.combined([s.scores for s in sessions if s.scores is not None])
        if scores is not None:
            try:
                self._judge(out, scores)
            except CallFailed as error:
                out.decision, out.acceptance = "kept", []
                out.reason = out.failure = f"it could not be exported: {error}"
        if out.decision != "reverted":  # else what the sessions trained on top of it is gone, too
            try:
                self._merge(out, sessions)
            except CallFailed as error:
                out.failure = f"the merge failed: {error}"
                out.reason = out.failure if out.reason == NOTHING else out.reason
        if out.failure:
            logger.warning("drafter update: %s", out.failure)
        out.seconds = clock.monotonic() - start
        return out

    def _judge(self, out: DrafterUpdate, scores: HeldOutScores) -> None:
        """Fill in what becomes of the candidate, and have the workers revert or export it."""
        version, judged = self.served.version + 1, bool(scores.positions.any())
        action: Action = "publish"
        if judged:
            out.tau = scores.taus()
        if not self._gate.enable:
            out.reason = "the gate is off"
        elif not judged:
            out.reason = "no held-out sequences yet"
            return
        else:
            action, out.reason, interval = decide(scores, self._gate, seed=version)
            if interval is not None:
                out.gain, out.gain_low = out.tau["candidate"] / out.tau["served"] - 1.0, interval[0]
        out.decision, which = OUTCOMES[action]
        if judged:
            out.acceptance = scores.conditional(which)
        if out.decision == "reverted" and which != "candidate":
            self._fleet.revert(which)
        # Serving the initial drafter again is a publication of its own; going back to the served one is not.
        if action in ("publish", "revert_initial"):
            out.drafter = self._fleet.export(version, self._dtype, out.acceptance)
            if out.drafter is None:
                self._fleet.revert("served")
                out.decision, out.reason = "reverted", f"it holds numbers that are not finite as {self._dtype}"
                out.acceptance = []

    def _merge(self, out: DrafterUpdate, sessions: Sequence[Session]) -> None:
        workers = self._fleet.workers()
        # A worker with several sessions in the step hands in what all of them changed.
        trained = list(dict.fromkeys(s.replica for s in sessions if s.steps and s.replica in workers))
        if not trained:
            return
        merged = self._fleet.merge(trained)
        out.excluded = merged.excluded
        for name, reason in out.excluded.items():
            logger.info("the session of %s is not merged yet: %s", name, reason)
        if out.reason == NOTHING:
            out.reason = "merged, and the next session scores it" if merged.included else "every session was excluded"

    def publish(self, step: int, within_s: float = 0.0) -> DrafterUpdate | None:
        """Publish what the update exported; None: the update is late, and the next step asks again."""
        if self.under_way is None or not futures.wait([self.under_way], timeout=within_s).done:
            return None
        done, self.under_way = self.under_way, None
        update = done.result()
        self._log.guard.count("publish", int(bool(update.failure)))
        if update.drafter is not None:
            self._fleet.stage(update.drafter)
            self._fleet.keep_as_served()
            self.served, self.since = replace(self.served, version=update.drafter.version), step
        if update.drafter is not None or update.acceptance:  # of one that nobody scored it is unknown
            self.served = replace(self.served, acceptance=tuple(update.acceptance))
        nbytes = len(update.drafter.weights) if update.drafter else 0
        self._log.published(step, update, nbytes, self.served.version)
        taus = ", ".join(f"{which} {tau:.2f}" for which, tau in update.tau.items()) or "unknown"
        logger.info("drafter %s (%s); held-out accept length: %s", update.decision, update.reason, taus)
        return update

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
