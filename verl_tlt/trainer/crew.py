"""The spot workers of one replica as one: they start and stop together, and their answers are added up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from verl_tlt.messages.training import BufferStats, SessionResult
from verl_tlt.trainer.drafter_update import gather
from verl_tlt.trainer.fleet import Call, CallFailed

T = TypeVar("T")


class CrewCall(Generic[T]):
    """Calls to all workers of a replica, as one (see `fleet.Call`): done when all are.

    Args:
        calls: one for each worker.
        together: their answers as one.
    """

    def __init__(self, calls: Sequence[Call[T]], together: Callable[[Sequence[T]], T]) -> None:
        self.calls, self._together = list(calls), together

    def done(self) -> bool:
        """Whether everybody has answered or failed."""
        return all(call.done() for call in self.calls)

    def result(self, timeout_s: float) -> T:
        """What all answered within the bound; who failed fails all, after the others have answered."""
        answers, failures = [], []
        deadline = time.monotonic() + timeout_s
        for call in self.calls:
            try:
                answers.append(call.result(max(0.0, deadline - time.monotonic())))
            except CallFailed as error:
                failures.append(error)
        if failures:
            raise CallFailed(str(failures[0]), died=any(error.died for error in failures))
        return self._together(answers)


def one_session(results: Sequence[SessionResult]) -> SessionResult:
    """The sessions that a replica's workers had at the same time, as one."""
    longest = max(r.seconds for r in results)
    trained = [r for r in results if r.tokens and math.isfinite(r.loss)]
    tokens = sum(r.tokens for r in trained)
    scores = {str(i): r.scores for i, r in enumerate(results) if r.scores is not None}

    def mean(values: Sequence[float]) -> float:
        return sum(value * r.tokens for value, r in zip(values, trained, strict=True)) / tokens

    return SessionResult(
        outcome="stopped" if any(r.outcome == "stopped" for r in results) else "exhausted",
        steps=sum(r.steps for r in results),
        tokens=sum(r.tokens for r in results),
        epochs=max(r.epochs for r in results),
        skipped=sum(r.skipped for r in results),
        seconds=longest,
        loss=mean([r.loss for r in trained]) if trained else math.nan,
        acc=tuple(mean(column) for column in zip(*(r.acc for r in trained), strict=True)),
        scores=gather(scores) or next(iter(scores.values()), None),  # the latter: judged, and nothing was held out
        judged_s=max(r.judged_s for r in results),
        slowest_s=max(r.slowest_s for r in results),
        devices=sum(r.seconds for r in results) / longest if longest else 0.0,
    )


def one_buffer(stats: Sequence[BufferStats]) -> BufferStats:
    """What a replica's workers hold together; trained on is what the fullest has, for one that can train is enough."""
    first, *others = stats
    for other in others:
        first = replace(
            first,
            sequences=first.sequences + other.sequences,
            tokens=first.tokens + other.tokens,
            train_tokens=max(first.train_tokens, other.train_tokens),
            bytes=first.bytes + other.bytes,
            incomplete=first.incomplete + other.incomplete,
        )
    return first
