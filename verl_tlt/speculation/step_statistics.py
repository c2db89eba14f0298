"""Sums over an engine's steps since they were last asked for, which the server does once per RL step."""

import math
import statistics
from collections import Counter, defaultdict, deque
from dataclasses import replace

from verl_tlt.messages.rollout import EngineStats, LoadInterval, ResponseDrafts, StepTime
from verl_tlt.speculation.types import OFF, Step

LATENCY_SAMPLES = 64
"""Latest clean steps kept per draft length and batch, for their median."""
INTERVAL_S, MAX_INTERVALS = 0.25, 512
"""Seconds of a `LoadInterval` at first, and how many there may be before the seconds double."""
SUMMED = ("control_s", "num_decode_tokens", "num_draft_tokens", "num_drafts", "num_generation_tokens")
"""Fields that `Step` and `EngineStats` both have."""
CLASSES_PER_OCTAVE = 8
"""Classes of response lengths between one and its double: they bound what an engine reports."""


class _LoadIntervals:
    def __init__(self) -> None:
        self._width = INTERVAL_S
        self._rows: list[list[float]] = []  # off, start, end; sums: batches, contexts, seconds, plain steps, steps

    def add(self, step: Step) -> None:
        row = [float(step.drafted == OFF), step.unix_s - step.latency_s, step.unix_s, 0.0, 0.0, 0.0, 0.0, 0.0]
        if step.decode_only and step.batch > 0:
            batch = step.batch
            row[3:] = batch, step.kv_tokens / batch, step.latency_s, step.num_decode_tokens / batch, 1.0
        self._put(row)
        if len(self._rows) > MAX_INTERVALS:
            self._width *= 2
            rows, self._rows = self._rows, []
            for row in rows:
                self._put(row)

    def _put(self, row: list[float]) -> None:
        last = self._rows[-1] if self._rows else None
        if last is None or last[0] != row[0] or last[2] // self._width != row[2] // self._width:
            self._rows.append(row)
            return
        last[2] = row[2]
        for i in range(3, len(row)):
            last[i] += row[i]

    def rows(self) -> tuple[LoadInterval, ...]:
        return tuple(
            LoadInterval(start, end, batches / max(n, 1.0), contexts / max(n, 1.0), seconds, plain_steps, off > 0)
            for off, start, end, batches, contexts, seconds, plain_steps, n in self._rows
        )


class StepSums:
    """Sums over engine steps since they were last reset; `EngineStats` says what each of them is."""

    def __init__(self) -> None:
        self._responses = DraftsByLength()
        self._begin()

    def _begin(self) -> None:
        self._sums = EngineStats()
        self._offered: Counter[int] = Counter()  # by draft position, ascending
        self._accepted: Counter[int] = Counter()
        self._steps_by_draft_length: Counter[int] = Counter()
        self._intervals = _LoadIntervals()
        self._tokens_by_batch: Counter[int] = Counter()
        self._step_times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=LATENCY_SAMPLES))

    def add(self, step: Step) -> None:
        sums = self._sums
        sums.num_steps += 1
        sums.num_passes += step.batch
        for name in SUMMED:
            setattr(sums, name, getattr(sums, name) + getattr(step, name))
        self._intervals.add(step)
        draft_length = OFF if step.drafted == OFF else step.verified
        for i, count in enumerate(step.num_accepted_tokens_per_pos):
            self._offered[i] += step.num_drafts
            self._accepted[i] += count
        self._steps_by_draft_length[draft_length] += 1
        if step.clean:
            self._step_times[draft_length, step.batch].append(step.latency_s)
        if step.decode_only and step.batch:
            self._tokens_by_batch[step.batch] += step.num_decode_tokens
        self._responses.add(step)

    def stats(self, reset: bool = False) -> EngineStats:
        """The sums so far."""
        stats = replace(
            self._sums,
            num_draft_tokens_per_pos=tuple(self._offered.values()),
            num_accepted_tokens_per_pos=tuple(self._accepted.values()),
            steps_by_draft_length=dict(sorted(self._steps_by_draft_length.items())),
            tokens_by_batch=dict(sorted(self._tokens_by_batch.items())),
            load_intervals=self._intervals.rows(),
            step_times=tuple(StepTime(k, b, statistics.median(v)) for (k, b), v in sorted(self._step_times.items())),
            responses=self._responses.rows(reset),
        )
        if reset:
            self._begin()
        return stats


class DraftsByLength:
    """Drafts and accepted tokens by the length that their response reached in the end.

    A rollout ends with its longest responses, whose acceptance differs from the batch's: late in a response the context
    is longer than most of what a drafter was trained on.
    """

    def __init__(self) -> None:
        self._running: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # request → [drafts, accepted tokens]
        self._ended: dict[int, list[int]] = {}  # class → [responses, tokens, drafts, accepted tokens]

    def add(self, step: Step) -> None:
        """Count a step's drafts and the requests that ended; one without any token is forgotten."""
        for request, tokens in step.accepted:
            row = self._running[request]
            row[0] += 1
            row[1] += tokens
        for request, tokens in step.ended:
            drafts, accepted = self._running.pop(request, (0, 0))
            if tokens > 0:
                row = self._ended.setdefault(round(CLASSES_PER_OCTAVE * math.log2(tokens)), [0, 0, 0, 0])
                for i, count in enumerate((1, tokens, drafts, accepted)):
                    row[i] += count

    def rows(self, reset: bool = False) -> tuple[ResponseDrafts, ...]:
        """The sums by class of length, ascending, over the responses that ended since the last reset."""
        rows = tuple(ResponseDrafts(*row) for _, row in sorted(self._ended.items()))
        if reset:
            self._ended = {}
        return rows
