"""Between two rollouts: judge the candidate, export it if it is to be served, and merge what the sessions trained.

Runs in a background thread while old log-probs and the actor update run, with the weight sync as its deadline: after a
late one the engines keep what they serve for another step. The workers do the arithmetic on the host, for the actor has
the devices by then; `trainer.gate` decides. The scores come with the sessions, and are of the candidate that was merged
before these: it is judged one step after it was merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import HeldOutScores, MergeVerdict
from verl_tlt.trainer.gate import decide
from verl_tlt.trainer.waits import SYSTEM, CallFailed, Clock
from verl_tlt.trainer.watch import EndedSession

if TYPE_CHECKING:
    from verl_tlt.trainer.spot_workers import Fleet

logger = logging.getLogger(__name__)

NOTHING = "no session trained"


@dataclass(kw_only=True)
class DrafterUpdate(MergeVerdict):
    """What became of the candidate, and of a step's sessions."""

    drafter: DrafterFile | None = None
    """To be published; None: nothing changes for the engines."""
    acceptance: list[float] = field(default_factory=list)
    """Conditional acceptance by draft position of whatever is served from now on."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Worker -> why it is not in the merge."""
    failure: str = ""
    """Why exporting or merging failed; empty: neither did."""


def update_drafter(
    fleet: Fleet,
    config: TLTConfig,
    sessions: Sequence[EndedSession],
    version: int,
    dtype: str,
    clock: Clock = SYSTEM,
) -> DrafterUpdate:
    """Judge what was merged before these sessions, export it if it is to be served, and merge what they trained.

    A publication gets the number `version`, and is stored in the rollout's `dtype`. Either half may fail alone: what
    was exported is published although the merge failed, and what was not merged is handed in again later.
    """
    start = clock.monotonic()
    out = DrafterUpdate(reason=NOTHING)
    scores = HeldOutScores.combined([s.result.scores for s in sessions if s.result.scores is not None])
    if scores is not None:
        try:
            _judge(out, scores, fleet, config, version, dtype)
        except CallFailed as error:
            out.decision, out.acceptance = "kept", []
            out.reason = out.failure = f"it could not be exported: {error}"
    if out.decision != "reverted":  # else what the sessions trained on top of it is gone, too
        try:
            _merge(out, fleet, sessions)
        except CallFailed as error:
            out.failure = f"the merge failed: {error}"
            out.reason = out.failure if out.reason == NOTHING else out.reason
    if out.failure:
        logger.warning("drafter update: %s", out.failure)
    out.seconds = clock.monotonic() - start
    return out


def _merge(out: DrafterUpdate, fleet: Fleet, sessions: Sequence[EndedSession]) -> None:
    workers = fleet.workers()
    # A worker with several sessions in the step hands in what all of them changed.
    trained = list(dict.fromkeys(s.replica for s in sessions if s.result.steps and s.replica in workers))
    if not trained:
        return
    merged = fleet.merge(trained)
    out.excluded = merged.excluded
    for name, reason in out.excluded.items():
        logger.info("the session of %s is not merged yet: %s", name, reason)
    if out.reason == NOTHING:
        out.reason = "merged, and the next session scores it" if merged.included else "every session was excluded"


def _judge(
    out: DrafterUpdate, scores: HeldOutScores, fleet: Fleet, config: TLTConfig, version: int, dtype: str
) -> None:
    """Fill in what becomes of the candidate, and have the workers revert or export it."""
    serves_another = False
    if not config.gate.enable:
        out.decision, out.reason, serves_another = "published", "the gate is off", True
        if len(scores.positions):
            out.acceptance, out.tau = scores.conditional("candidate"), scores.taus()
    elif not len(scores.positions):
        out.reason = "no held-out sequences yet"
    else:
        serves_another = _carry_out(out, scores, fleet, config, version)
    if serves_another:
        out.drafter = fleet.export(version, dtype, out.acceptance)
        if out.drafter is None:
            fleet.revert("served")
            out.decision, out.reason = "reverted", f"it holds numbers that are not finite as {dtype}"
            out.acceptance = []


def _carry_out(out: DrafterUpdate, scores: HeldOutScores, fleet: Fleet, config: TLTConfig, seed: int) -> bool:
    """The gate's verdict; returns whether the engines are to load another drafter than they have."""
    verdict = decide(scores, config.gate, seed=seed)
    out.tau, out.reason = scores.taus(), verdict.reason
    if verdict.interval is not None:
        out.gain, out.gain_low = verdict.versus_served, verdict.interval[0]
    if verdict.action == "publish":
        out.decision, out.acceptance = "published", scores.conditional("candidate")
        return True
    if verdict.action == "hold":
        out.decision, out.acceptance = "kept", scores.conditional("served")
        return False
    which: Literal["served", "initial"] = "initial" if verdict.action == "revert_initial" else "served"
    fleet.revert(which)
    out.decision, out.acceptance = "reverted", scores.conditional(which)
    # Serving the initial drafter again is a publication of its own; going back to the served one is not.
    return which == "initial"
