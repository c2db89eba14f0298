from types import SimpleNamespace

from verl_tlt.control.types import Load
from verl_tlt.rollout.decode_load import RECOUNT_EVERY, DecodeLoad


def request(name, computed, prefill=False, tokens=None):
    tokens = computed + 1 if tokens is None else tokens
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_tokens=tokens, is_prefill_chunk=prefill)


def test_a_prefill_neither_counts_nor_hides():
    load = DecodeLoad(1000)
    running = [request("a", 10), request("b", 20), request("chunk", 64, prefill=True, tokens=200), request("new", 0)]
    assert load.count(running, known=3, grown=0, draft_length=2) == Load(2, 30)
    assert load.prefilling == {"chunk", "new"}
    assert load.longest == 200


def test_before_anybody_decodes_those_about_to_are_planned_for():
    load = DecodeLoad(1000)
    running = [request("a", 0, tokens=12), request("b", 0, tokens=20)]
    assert load.count(running, known=0, grown=0, draft_length=0) == Load(2, 32)
    assert load.prefilling == {"a", "b"}


def test_a_steady_batch_grows_by_what_was_emitted():
    load = DecodeLoad(1000)
    running = [request("a", 10), request("b", 20)]
    load.count(running, known=2, grown=0, draft_length=0)
    assert load.count(running, known=2, grown=3, draft_length=1) == Load(2, 33)
    assert load.longest >= 22


def test_whoever_comes_or_goes_is_counted():
    load = DecodeLoad(1000)
    a, b, c = request("a", 10), request("b", 20), request("c", 30)
    load.count([a, b], known=2, grown=0, draft_length=0)
    assert load.count([a, b, c], known=2, grown=5, draft_length=0) == Load(2, 30)  # c was admitted in this step
    assert load.count([a, b, c], known=3, grown=5, draft_length=0) == Load(3, 60)
    assert load.count([b, c], known=2, grown=5, draft_length=0) == Load(2, 50)
    assert load.count([b, a], known=1, grown=5, draft_length=0) == Load(1, 20)  # c left and a came: still two


def test_the_estimate_is_corrected_now_and_then():
    load = DecodeLoad(10_000)
    running = [request("a", 10)]
    load.count(running, known=1, grown=0, draft_length=0)
    for _ in range(RECOUNT_EVERY):
        last = load.count(running, known=1, grown=1, draft_length=0)
    assert last == Load(1, 10 + RECOUNT_EVERY)
    assert load.count(running, known=1, grown=1, draft_length=0) == Load(1, 10)


def test_near_the_drafters_limit_the_longest_context_is_exact():
    load = DecodeLoad(context_limit=20)
    running = [request("a", 10), request("b", 15)]
    load.count(running, known=2, grown=0, draft_length=3)
    for computed in (15, 15, 16):  # its drafts are rejected: the context hardly grows
        running[1].num_computed_tokens = computed
        load.count(running, known=2, grown=1, draft_length=3)
        assert load.longest == computed + 4
