"""The load of the coming step, and that around `min_tokens` no draft is so long that vLLM would count wrong."""

import itertools
import random
import sys
from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.decode_load import OVERDUE, RECOUNT_EVERY, STEPS_IN_FLIGHT, DecodeLoad, StopBoundary
from verl_tlt.engine_core.decode_load import room_before_stop as room_of
from verl_tlt.speculation.policies import FixedPolicy
from verl_tlt.speculation.step_control import Limits, StepControl
from verl_tlt.speculation.types import Load


def request(name, computed, prefill=False, tokens=None):
    tokens = computed + 1 if tokens is None else tokens
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_tokens=tokens, is_prefill_chunk=prefill)


@pytest.fixture
def load():
    return DecodeLoad(10_000)


def test_a_prefill_neither_counts_nor_hides(load):
    running = [request("a", 10), request("b", 20), request("chunk", 64, prefill=True, tokens=200), request("new", 0)]
    assert load.count(running, known=3, grown=0, draft_length=2) == Load(2, 30)
    assert load.prefilling == {"chunk", "new"}
    assert load.longest == 200


def test_before_anybody_decodes_those_about_to_are_planned_for(load):
    running = [request("a", 0, tokens=12), request("b", 0, tokens=20)]
    assert load.count(running, known=0, grown=0, draft_length=0) == Load(2, 32)
    assert load.prefilling == {"a", "b"}


def test_whoever_comes_or_goes_is_counted(load):
    a, b, c = request("a", 10), request("b", 20), request("c", 0, tokens=30)
    load.count([a, b], known=2, grown=0, draft_length=0)
    assert load.count([a, b, c], known=2, grown=4, draft_length=0) == Load(2, 34)  # c was admitted in this step
    c.num_computed_tokens = 30
    assert load.count([a, b, c], known=3, grown=4, draft_length=0) == Load(3, 68)
    assert load.count([b, c], known=2, grown=6, draft_length=0, ended={"a"}) == Load(2, 58)  # a: 10 + 2 + 2 + 2


def test_one_that_left_unannounced_makes_it_look_again(load):
    a, b, c = request("a", 10), request("b", 20), request("c", 30)
    load.count([a, b, c], known=3, grown=0, draft_length=0)
    assert load.count([b, c], known=2, grown=5, draft_length=0) == Load(2, 50)
    assert load.count([b], known=2, grown=5, draft_length=0) == Load(1, 20)  # preempted in this very step


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_looking_at_everybody(seed):
    """A made engine: prompts in chunks, drafts of 0 to 3, requests that end, are aborted or preempted."""
    rng, load = random.Random(seed), DecodeLoad(100_000)
    running, grown, ended, names = [], 0, set(), itertools.count()
    for step in range(400):
        known = len(running)
        if rng.random() < 0.02 and known:
            running.pop()  # preempted while this step is scheduled
        elif len(running) < 40 and rng.random() < 0.4:
            running.append(request(f"r{next(names)}", 0, tokens=rng.randrange(20, 200)))
        found = load.count(running, known, grown, 3, ended)
        old, new = running[: min(known, len(running))], running[known:]
        decoding = [r for r in old if not r.is_prefill_chunk]
        assert load.prefilling == {r.request_id for r in new + [r for r in old if r.is_prefill_chunk]}
        if decoding:
            assert found.batch == len(decoding)
            assert found.kv_tokens == pytest.approx(sum(r.num_computed_tokens for r in decoding), rel=0.05), step
            assert load.longest >= max(r.num_computed_tokens for r in running)
        grown, ended = 0, set()
        if seed % 2:
            load.refresh(running, {})
        for r in running:
            if r in decoding:
                gain = rng.randrange(1, 5)
                r.num_computed_tokens += gain
                r.num_tokens += gain
                grown += gain
            else:
                r.num_computed_tokens = min(r.num_computed_tokens + 64, r.num_tokens)
                r.is_prefill_chunk = r.num_computed_tokens < r.num_tokens
        for r in [r for r in running if rng.random() < 0.01]:
            running.remove(r)
            ended.add(r.request_id)


def test_the_estimate_is_corrected_while_a_step_is_under_way(load):
    a, b = request("a", 10), request("b", 20)
    load.count([a, b], known=2, grown=0, draft_length=0)
    for _ in range(RECOUNT_EVERY):
        load.refresh([a, b], {"a": 2, "b": 2})
        last = load.count([a, b], known=2, grown=2, draft_length=1)
    assert last == Load(2, 30 + 2 * RECOUNT_EVERY)
    a.num_computed_tokens, b.num_computed_tokens = 100, 202  # as scheduled, 2 tokens of this step included
    joined = request("c", 0, tokens=50)
    load.count([a, b, joined], known=2, grown=2, draft_length=1)
    load.refresh([a, b, joined], {"a": 2, "b": 2, "c": 50})
    assert load.longest == 202
    joined.num_computed_tokens = 50
    assert load.count([a, b, joined], known=3, grown=3, draft_length=1) == Load(3, 98 + 200 + 3 + 50)
    assert load.longest == 204


def test_without_a_pause_to_look_in_a_step_waits_for_the_correction(load):
    running = [request("a", 10)]
    load.count(running, known=1, grown=0, draft_length=0)
    for _ in range(OVERDUE):
        last = load.count(running, known=1, grown=1, draft_length=0)
    assert last == Load(1, 10 + OVERDUE)
    assert load.count(running, known=1, grown=1, draft_length=0) == Load(1, 10)


def test_near_the_drafters_limit_the_longest_context_is_exact():
    load = DecodeLoad(context_limit=20)
    running = [request("a", 10), request("b", 15)]
    load.count(running, known=2, grown=0, draft_length=3)
    for computed in (15, 15, 16):  # its drafts are rejected: the context hardly grows
        running[1].num_computed_tokens = computed
        load.count(running, known=2, grown=1, draft_length=3)
        assert load.longest == computed + 4


# ---------------------------------------------------------------- requests that must not stop yet


ARMS = (0, 1, 2, 3)


def bounded(min_tokens=10, stops=(2,), has=0, **changes):
    params = SimpleNamespace(min_tokens=min_tokens, all_stop_token_ids=set(stops))
    state = dict(
        sampling_params=params, num_output_tokens=has, num_output_placeholders=0,
        status=SimpleNamespace(name="RUNNING"), is_finished=lambda: False,
    )  # fmt: skip
    return SimpleNamespace(**(state | changes))


def miscounted(least, in_flight, limited, steps=200, seed=0):
    """Tokens of one request whose stop tokens vLLM 0.28 would hide, or not, against `least` (`min_tokens`).

    `MinTokensLogitsProcessor.apply_with_spec_decode` counts on along the draft; `apply`, for the token behind it, does
    not; neither hides anything once the request was removed. `in_flight` steps are scheduled before the result of the
    first is known, as under async scheduling; `limited`: drafts are held to `room_before_stop`.
    """
    rng = random.Random(seed)
    wrong = true = drafted = 0
    known, removed, waiting = 0, False, []
    for _ in range(steps):
        verified, drafted = drafted, 0  # this step verifies what the last one drafted
        most = known + sum(1 + d for _, d in waiting) + 1 + verified
        room = room_of(least, known, most) if limited else sys.maxsize
        drafted = StepControl(FixedPolicy(rng.choice(ARMS)), Limits(ARMS)).choose(Load(1, 0), room=room)
        # The worker takes all drafts that it has no answer for as accepted.
        optimistic = known + sum(1 + d for _, d in waiting)
        removed = removed or optimistic >= least
        accepted = rng.randint(0, verified)
        for i in range(accepted + 1):
            hidden = not removed and optimistic + (i if i < verified else 0) < least
            wrong += hidden != (true + i < least)
        true += accepted + 1
        waiting.append((accepted, verified))
        if len(waiting) >= in_flight:
            known += 1 + waiting.pop(0)[0]
    return wrong


@pytest.mark.parametrize("in_flight", [1, 2, STEPS_IN_FLIGHT])
@pytest.mark.parametrize("least", [1, 2, 3, 4, 7, 20, 100])
def test_no_token_is_judged_by_a_wrong_count(least, in_flight):
    assert not any(miscounted(least, in_flight, limited=True, seed=seed) for seed in range(20))
    if least > 1:  # the first token comes without a draft
        assert any(miscounted(least, in_flight, limited=False, seed=seed) for seed in range(20))


def test_far_from_the_boundary_drafts_are_as_long_as_wanted():
    assert room_of(1000, has=10, most=14) > 900
    assert room_of(10, has=10, most=14) == sys.maxsize
    assert room_of(10, has=9, most=11) == 0


def test_the_request_that_bears_least_decides_until_it_may_stop():
    boundary, near, far = StopBoundary(), bounded(has=4), bounded(min_tokens=100)
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
    harmless = [bounded(min_tokens=0), bounded(stops=()), bounded(has=10), bounded(sampling_params=None)]
    assert boundary.room(harmless, 3) == sys.maxsize


def test_one_that_is_preempted_waits_for_its_return():
    boundary, one = StopBoundary(), bounded(has=8)
    assert boundary.room([one], 0) == 0
    one.status.name = "PREEMPTED"
    assert boundary.room([], 0) == sys.maxsize
    one.status.name = "RUNNING"
    assert boundary.room([one], 0) == 0
