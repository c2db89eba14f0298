"""One engine step from its scheduling to its `StepRecord`, and the engine's trace: one JSON line per step."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.engine_core.verified import NOTHING, Verified
from verl_tlt.files.ownership import open_to_append
from verl_tlt.speculation.step_control import StepControl
from verl_tlt.speculation.step_statistics import StepTotals
from verl_tlt.speculation.types import StepRecord

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

logger = logging.getLogger(__name__)

PAUSE_FLOOR_S = 0.002  # a gap shorter than this between two steps is vLLM's own work
PAUSE_SHARE = 0.5  # a gap longer than this share of the step itself means that the engine was held up
FLUSH_S = 0.5
"""Seconds of engine steps between two writes of the trace."""


@dataclass(slots=True)
class EngineStep:
    """What was known of a step when it was scheduled, and (below `outputs`) what came back."""

    output: SchedulerOutput
    started_s: float
    paused_s: float
    """Seconds between the end of the step before and the start of this one, if none was in flight."""
    batch: int
    """Decode-phase requests."""
    kv_tokens: int
    arm: int
    """K that it drafts, or OFF."""
    previous_arm: int
    """K that the step before drafted, which this one verifies."""
    blocked: bool
    """A context is too long for the drafter, so that nothing was drafted."""
    prefilling: set[str]
    """Requests that still compute their prompt."""
    may_lack_drafts: bool
    """There is no drafter, so a request may go without a draft (`tlt.speculation.source=ngram`)."""
    outputs: Mapping[int, EngineCoreOutputs] = field(default_factory=dict)
    """By client."""
    freed: list[tuple[str, int]] = field(default_factory=list)
    """(request, its tokens) of those that ended with this step or since the one before."""
    verified: Verified = NOTHING
    ended: bool = False
    """A request ended with this step."""
    finished_s: float = 0.0
    previous_finished_s: float = 0.0
    unix_s: float = 0.0
    control_s: float = 0.0
    """Seconds that the engine waited for verl-tlt since the step before."""

    def record_with(self, control: StepControl) -> None:
        """Hand the finished step to the controller."""
        emitted, produced = self._tokens()
        paused = self.paused_s > max(PAUSE_FLOOR_S, PAUSE_SHARE * (self.finished_s - self.started_s))
        decode_only = not self.prefilling and not paused
        # From 0.33 on vLLM's V2 runner drafts nothing where every request ends with the step or has prompt left.
        skipped = bool(getattr(self.output, "skip_drafts", False)) and self.arm > 0
        verified = self.verified
        # Where requests may lack a draft, a missing one counts as one of which nothing was accepted: what K costs and
        # brings is then that of the whole batch, as with a drafter.
        drafts = self.batch if self.may_lack_drafts and self.previous_arm > 0 else verified.num_drafts
        length = self.previous_arm if drafts else 0
        whole = self.may_lack_drafts or (drafts == self.batch and verified.num_draft_tokens == length * self.batch)
        clean = (
            decode_only and not (self.blocked or skipped) and self.arm == self.previous_arm and (self.arm <= 0 or whole)
        )
        step = StepRecord(
            batch=self.batch,
            kv_tokens=self.kv_tokens if self.batch else 0,
            drafted=self.arm,
            verified=length,
            num_drafts=drafts,
            num_accepted_tokens_per_pos=verified.num_accepted_tokens_per_pos(length),
            produced=produced,
            latency_s=self.finished_s - (self.started_s if paused else self.previous_finished_s),
            clean=clean,
        )
        control.record(step, StepTotals(emitted, verified.num_draft_tokens, self.unix_s, decode_only, self.control_s))
        control.responses(verified.accepted_of, self.freed)

    def _tokens(self) -> tuple[int, int]:
        """(tokens that requests got, the part of them that decode-phase requests got)."""
        sampled = self.verified.tokens
        if sampled is not None and not self.ended and not self.prefilling:
            return sampled, sampled
        # A request that ends gets fewer tokens than were sampled.
        counts = [(o.request_id, len(o.new_token_ids)) for client in self.outputs.values() for o in client.outputs]
        return sum(n for _, n in counts), sum(n for request, n in counts if request not in self.prefilling)


class StepTrace:
    """Appends one JSON line per engine step to a file, a buffer at a time; a disk that fails costs only the trace."""

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
            self._flushed_at = unix_s
            self.flush()

    def flush(self) -> None:
        """Write what is queued."""
        lines, self._lines = self._lines, []
        if not lines or self.failed:
            return
        try:
            with os.fdopen(open_to_append(self.path), "a") as file:
                file.writelines(lines)
        except OSError as error:
            self.failed = str(error)
            logger.warning("The engine trace %s stops here: %s", self.path, error)
