"""Between two rollouts: judge the candidate, export it if it is to be served, and merge what the sessions trained.

Runs in a background thread while old log-probs and the actor update run, with the weight sync as its deadline: after a
late one the engines keep what they serve for another step. The workers do the arithmetic on the host, for the actor has
the devices by then; `trainer.gate` decides. The scores come with the sessions, and are of the candidate that was merged
before these: it is judged one step after it was merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, HeldOutScores, MergeVerdict
from verl_tlt.trace.events import Session
from verl_tlt.trainer.gate import Action, decide
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.waits import CallFailed

if TYPE_CHECKING:
    from verl_tlt.trainer.spot_workers import Fleet

logger = logging.getLogger(__name__)

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

    drafter: DrafterFile | None = None  # The drafter to publish; None: nothing changes for the engines
    acceptance: list[float] = field(default_factory=list)
    """Conditional acceptance by draft position of whatever is served from now on."""
    excluded: dict[str, str] = field(default_factory=dict)  # Worker -> why it is not in the merge
    failure: str = ""  # Why exporting or merging failed; empty: neither did


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
        version, judged = self.served.version + 1, len(scores.positions) > 0
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
        if update.acceptance:
            self.served = replace(self.served, acceptance=tuple(update.acceptance))
        nbytes = len(update.drafter.weights) if update.drafter else 0
        self._log.published(step, update, nbytes, self.served.version, self.since)
        taus = ", ".join(f"{which} {tau:.2f}" for which, tau in update.tau.items()) or "unknown"
        logger.info("drafter %s (%s); held-out accept length: %s", update.decision, update.reason, taus)
        return update

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
