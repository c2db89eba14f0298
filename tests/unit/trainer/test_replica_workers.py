"""Several spot workers of one replica as one: when they are done, what fails, what their sessions come to."""

import dataclasses
import math

import numpy as np
import pytest
import ray
from ray import exceptions as errors

from verl_tlt.idle.replica_idle import PhaseAccount
from verl_tlt.messages.training import BufferStats, HeldOutScores, SessionResult
from verl_tlt.trace.events import Session
from verl_tlt.trainer.waits import CallFailed, answer
from verl_tlt.trainer.watch import PhaseReport

LONG = SessionResult("stopped", steps=30, tokens=3000, epochs=1.5, seconds=10.0, loss=2.0)
SHORT = SessionResult("exhausted", steps=10, tokens=1000, epochs=4.0, skipped=1, seconds=5.0, loss=1.0)
NOTHING = SessionResult("exhausted")


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (errors.ActorDiedError(), True),
        (errors.OutOfMemoryError("killed by the memory monitor"), True),
        (errors.GetTimeoutError(), False),
        (errors.ObjectStoreFullError(), False),
        (errors.RayTaskError("f", "", OSError()), False),
    ],
)
def test_an_actor_that_was_killed_is_dead_and_one_that_raised_or_is_slow_is_not(monkeypatch, error, dead):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(CallFailed) as failed:
        answer(None, 1.0)
    assert (failed.value.died, failed.value.silent) == (dead, isinstance(error, errors.GetTimeoutError))


def test_sessions_side_by_side_are_one():
    found = SessionResult.combined([LONG, SHORT, LONG, NOTHING])
    assert (found.outcome, found.steps, found.tokens, found.skipped, found.seconds) == ("stopped", 70, 7000, 1, 10.0)
    assert found.devices == 2.5, "of four devices, one idle and one for half of the time"
    assert found.loss == pytest.approx((2 * 3000 * 2.0 + 1000 * 1.0) / 7000)
    alone = SessionResult.combined([NOTHING, NOTHING])
    assert (alone.steps, alone.devices) == (0, 0.0) and math.isnan(alone.loss)


def test_what_each_scored_is_judged_together():
    def scored(sequences):
        counts = np.ones((sequences, 4))
        scores = HeldOutScores(np.arange(sequences), np.full(sequences, 9), counts, counts, counts)
        return dataclasses.replace(LONG, scores=scores, judged_s=float(sequences))

    assert SessionResult.combined([scored(2), LONG, scored(3)]).judged_s == 3.0, "side by side"
    assert SessionResult.combined([scored(2), LONG, scored(3)]).scores.candidate.shape == (5, 4)
    assert len(SessionResult.combined([scored(0), scored(0)]).scores.positions) == 0, "judged, with nothing held out"
    assert SessionResult.combined([LONG, SHORT]).scores is None


def test_buffers_add_up_and_one_that_can_train_is_enough():
    first = BufferStats(sequences=3, tokens=300, train_tokens=250, bytes=1000)
    second = BufferStats(sequences=1, tokens=90, train_tokens=80, bytes=300, incomplete=2)
    assert BufferStats.combined([first, second]) == BufferStats(4, 390, 250, 1300, 2)


def test_a_replica_of_four_devices_that_trains_on_two_and_a_half_uses_that_part_of_its_bubble(log):
    log.observed.devices = {"a": 4}
    account = PhaseAccount({"a": 10.0}, {"a": 10.0}, {}, 0, end=100.0)
    result = SessionResult.combined([LONG, SHORT, LONG, NOTHING])
    log.sampled(1, PhaseReport(account, [Session(**vars(result), t=100.0, step=1, replica="a", start=90.0, end=100.0)]))
    metrics = log.finish(1, {})
    assert metrics["tlt/bubble_used_frac"] == pytest.approx(2.5 / 4)
    assert metrics["tlt/bubble_s"] == metrics["tlt/bubble_trained_s"] == 10.0
