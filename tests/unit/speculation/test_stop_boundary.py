"""Around `min_tokens` no draft is so long that vLLM would count wrong; elsewhere it is as long as the policy wants."""

import random
import sys
from enum import Enum
from types import SimpleNamespace

import pytest

from verl_tlt.speculation.draft_length import STEPS_IN_FLIGHT, Limits, draft_length, room_before_stop
from verl_tlt.speculation.policies.base import FixedPolicy
from verl_tlt.speculation.stop_boundary import StopBoundary
from verl_tlt.speculation.types import Load

ARMS = (0, 1, 2, 3)


class Status(Enum):
    RUNNING = 1
    PREEMPTED = 2


def request(min_tokens=10, stops=(2,), has=0, placeholders=0, **changes):
    params = SimpleNamespace(min_tokens=min_tokens, all_stop_token_ids=set(stops))
    state = dict(
        sampling_params=params, num_output_tokens=has, num_output_placeholders=placeholders, status=Status.RUNNING,
        is_finished=lambda: False,
    )  # fmt: skip
    return SimpleNamespace(**(state | changes))


def rows_hidden(least, counted, drafts, removed):
    """Where vLLM 0.28 hides the stop tokens of a request: one entry per draft token, then the token behind them.

    `MinTokensLogitsProcessor.apply_with_spec_decode` counts on along the draft; `apply`, for the token behind it, does
    not; neither hides anything once the request was `removed`.
    """
    rows = [not removed and counted + i < least for i in range(drafts)]
    return [*rows, not removed and counted < least]


def miscounted(least, in_flight, bounded, steps=200, seed=0):
    """Tokens of one request whose stop tokens vLLM would hide, or not, against `least`.

    Args:
        least: `min_tokens`.
        in_flight: steps that are scheduled before the result of the first is known, as under async scheduling.
        bounded: whether drafts are held to `room_before_stop`.
    """
    rng = random.Random(seed)
    wrong = true = drafted = 0
    known, removed, waiting = 0, False, []
    for _ in range(steps):
        verified, drafted = drafted, 0  # this step verifies what the last one drafted
        most = known + sum(1 + d for _, d in waiting) + 1 + verified
        room = room_before_stop(least, known, most) if bounded else sys.maxsize
        drafted = draft_length(FixedPolicy(rng.choice(ARMS)), Load(1, 0), Limits(ARMS), room=room)
        # The worker takes all drafts that it has no answer for as accepted.
        optimistic = known + sum(1 + d for _, d in waiting)
        removed = removed or optimistic >= least
        accepted = rng.randint(0, verified)
        hidden = rows_hidden(least, optimistic, verified, removed)
        for i in range(accepted + 1):
            row = i if i < verified else verified
            wrong += hidden[row] != (true + i < least)
        true += accepted + 1
        waiting.append((accepted, verified))
        if len(waiting) >= in_flight:
            known += 1 + waiting.pop(0)[0]
    return wrong


@pytest.mark.parametrize("in_flight", [1, 2, STEPS_IN_FLIGHT])
@pytest.mark.parametrize("least", [1, 2, 3, 4, 7, 20, 100])
def test_no_token_is_judged_by_a_wrong_count(least, in_flight):
    assert not any(miscounted(least, in_flight, bounded=True, seed=seed) for seed in range(20))
    if least > 1:  # the first token comes without a draft
        assert any(miscounted(least, in_flight, bounded=False, seed=seed) for seed in range(20))


def test_far_from_the_boundary_drafts_are_as_long_as_wanted():
    assert room_before_stop(1000, has=10, most=14) > 900
    assert room_before_stop(10, has=10, most=14) == sys.maxsize
    assert room_before_stop(10, has=9, most=11) == 0


def test_a_draft_is_the_longest_arm_that_fits():
    limits, load = Limits((0, 1, 3)), Load(4, 100)
    for room, chosen in ((0, 0), (1, 1), (2, 1), (3, 3), (sys.maxsize, 3)):
        assert draft_length(FixedPolicy(3), load, limits, room=room) == chosen
        assert draft_length(FixedPolicy(0), load, limits, room=room, forced=3) == chosen


def test_the_request_that_bears_least_decides_until_it_may_stop():
    boundary, near, far = StopBoundary(), request(has=4), request(min_tokens=100)
    assert boundary.room([], 3) == sys.maxsize
    assert boundary.room([far], 0) == 100 - 1 - STEPS_IN_FLIGHT
    assert boundary.room([near], 0) == 10 - (4 + 1) - STEPS_IN_FLIGHT
    near.num_output_placeholders = 2
    assert boundary.room([], 2) == 0
    near.num_output_tokens, near.num_output_placeholders = 10, 0
    assert boundary.room([], 2) == 100 - 3 - STEPS_IN_FLIGHT
    far.is_finished = lambda: True
    assert boundary.room([], 2) == sys.maxsize


def test_only_requests_that_something_could_stop_count():
    boundary = StopBoundary()
    harmless = [request(min_tokens=0), request(stops=()), request(has=10), request(sampling_params=None)]
    assert boundary.room(harmless, 3) == sys.maxsize


def test_one_that_is_preempted_waits_for_its_return():
    boundary, one = StopBoundary(), request(has=8)
    assert boundary.room([one], 0) == 0
    one.status = Status.PREEMPTED
    assert boundary.room([], 0) == sys.maxsize
    one.status = Status.RUNNING
    assert boundary.room([one], 0) == 0
