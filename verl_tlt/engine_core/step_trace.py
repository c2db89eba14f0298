"""One trace line per engine step, written a buffer at a time."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from verl_tlt.ownership import open_to_append
from verl_tlt.speculation.types import StepRecord

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Seconds of engine steps between two writes of the trace."""


class StepTrace:
    """Appends one JSON line per engine step to a file, a buffer at a time. A disk that fails costs only the trace."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.failed: str | None = None
        self._lines: list[str] = []
        self._flushed_at = 0.0

    def add(self, step: StepRecord, unix_s: float) -> None:
        """Queue one line; written out after `FLUSH_S` seconds of steps, or by `flush`."""
        accepted = ",".join(map(str, step.num_accepted_tokens_per_pos))
        self._lines.append(
            f'{{"t":{unix_s:.4f},"batch":{step.batch},"kv":{step.kv_tokens},"k":{step.drafted},"verified":{step.verified},'
            f'"drafts":{step.num_drafts},"accepted":[{accepted}],"produced":{step.produced},"latency_s":{step.latency_s:.6f},'
            f'"clean":{"true" if step.clean else "false"}}}\n'
        )
        if unix_s - self._flushed_at > FLUSH_S:
            self.flush(unix_s)

    def flush(self, unix_s: float | None = None) -> None:
        """Write what is queued."""
        if unix_s is not None:
            self._flushed_at = unix_s
        lines, self._lines = self._lines, []
        if not lines or self.failed:
            return
        try:
            with os.fdopen(open_to_append(self.path), "a") as file:
                file.writelines(lines)
        except OSError as error:
            self.failed = str(error)
            logger.warning("The engine trace %s stops here: %s", self.path, error)
