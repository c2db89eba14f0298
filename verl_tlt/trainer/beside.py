"""What TLT costs outside its own calls: log-probs and update beside a merge, against the same phases without one.

A merge runs on the processors of spot workers while the actor works, and takes cores and memory bandwidth that no call
of ours is seen to wait for. So the two phases are timed per token in the steps of this run that had no session, hence
no merge, and what they take more beside one is told as a figure of its own. Pure functions of numbers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

PHASES = ("timing_s/old_log_prob", "timing_s/update_actor")
TOKENS = "perf/total_num_tokens"
TAP = "tlt/overhead_tap_s"
"""Part of the log-probs, and counted already."""
ENOUGH, KEPT = 2, 16
"""Steps without a merge that are needed, and how many are remembered."""


class BesideMerge:
    """Seconds that a step's log-probs and update took more than those of steps without a merge."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=KEPT)  # seconds per token

    def observe(self, metrics: Mapping[str, float], merging: bool) -> float | None:
        """Take note of a step; its extra seconds, or None where there was no merge or nothing to compare with.

        Args:
            metrics: verl's and ours.
            merging: sessions of its rollout were merged while it went on.
        """
        seconds = sum(float(metrics[phase]) for phase in PHASES if phase in metrics) - float(metrics.get(TAP, 0.0))
        tokens = float(metrics.get(TOKENS, 0.0))
        if seconds <= 0.0 or tokens <= 0.0:
            return None
        if not merging:
            self._alone.append(seconds / tokens)
            return None
        if len(self._alone) < ENOUGH:
            return None
        # The lower median: a first step compiles and allocates.
        return seconds - tokens * statistics.median_low(self._alone)
