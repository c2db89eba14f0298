"""The load of the coming step."""

import itertools
import random
from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.decode_load import OVERDUE, RECOUNT_EVERY, DecodeLoad
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
