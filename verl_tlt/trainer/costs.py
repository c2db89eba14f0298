"""The engines' step costs at the start of a run: measured once on one replica and shared by all.

Replicas of a run are alike, so one table serves them.
"""

from __future__ import annotations

import logging

import ray

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import Calibration
from verl_tlt.trainer.fleet import CALL_TIMEOUT_S, Fleet

logger = logging.getLogger(__name__)


def shared_calibration(fleet: Fleet, config: TLTConfig, policy_dir: str) -> float:
    """Give every engine a latency table; returns the seconds it took. Does nothing with `calibrate=false`."""
    if not config.speculation.calibrate:
        return 0.0
    fleet.on_workers("__ray_ready__")  # what they import and load while they start would be measured, too
    first, *others = fleet.replicas.values()
    found: Calibration = ray.get(first.server.tlt_calibrate.remote(), timeout=10 * CALL_TIMEOUT_S)
    ray.get([r.server.tlt_calibrate.remote(found) for r in others], timeout=CALL_TIMEOUT_S)
    logger.info("engine step costs measured in %.1f s: %s", found.seconds, found.latency)
    return found.seconds
