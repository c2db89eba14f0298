"""What is counted of an engine step, and which steps say what a draft length costs."""

from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.steps import EngineStep
from verl_tlt.speculation.types import OFF

ROWS = {"a": 0, "b": 1, "c": 2}
WHOLE = dict.fromkeys(ROWS, (7, 7, 7))


def scheduled(drafts, rows, contexts=None, new=(), chunks=(), fresh=()):
    """vLLM's output for a step: `new` requests and `chunks` of 50 tokens compute prompts, `fresh` have no token yet."""
    known = [name for name in rows if name not in new]
    tokens = {name: 50 if name in (*new, *chunks) else 1 + len(drafts.get(name, ())) for name in rows}
    contexts = dict.fromkeys(known, 100) | dict(contexts or {})
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts, num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=known, num_computed_tokens=[contexts[name] for name in known],
            num_output_tokens=[0 if name in (*chunks, *fresh) else 5 for name in known],
        ),
    )  # fmt: skip


def counted(
    drafts=WHOLE, sampled=(1, 1, 1), drafted=3, before=None, rows=ROWS, given=None, paused_s=0.0,
    blocked=False, gone=(), cut=False, **load,
):  # fmt: skip
    """A finished step of the requests `rows`, of which `sampled` tokens came back by row."""
    given = given or {name: sampled[row] for name, row in rows.items()}
    outputs = [SimpleNamespace(request_id=name, new_token_ids=[9] * n) for name, n in given.items()]
    output = scheduled(drafts, rows, **load)
    step = EngineStep(
        output=output, sampled=sampled, row_of=rows, batch=0, kv_tokens=0, drafted=drafted,
        verified=drafted if before is None else before, started_s=1.0, finished_s=1.02, previous_finished_s=0.9,
        paused_s=paused_s, blocked=blocked, gone=set(gone), cut=cut,
        outputs={0: SimpleNamespace(outputs=outputs)},
    )  # fmt: skip
    step.count()
    return step


def test_the_load_is_that_of_the_requests_that_decode():
    step = counted(contexts={"a": 10, "b": 20, "c": 300})
    assert (step.batch, step.kv_tokens, step.longest, step.decode_only) == (3, 330, 300, True)


@pytest.mark.parametrize("prefill", ["new", "chunks", "fresh"])
def test_a_prompt_in_the_step_is_not_decoded(prefill):
    drafts = {"a": (7, 7, 7), "b": (7, 7, 7)}
    step = counted(drafts, sampled=(4, 4, 1), contexts={"a": 10, "b": 20}, **{prefill: ("c",)})
    assert (step.batch, step.kv_tokens, step.decode_only) == (2, 30, False)
    assert step.num_decode_tokens == 8
    assert step.longest == {"new": 50, "chunks": 150, "fresh": 101}[prefill]


def test_positions_count_every_draft_that_got_as_far():
    step = counted(sampled=(1, 3, 4))
    assert (step.num_drafts, step.num_draft_tokens, step.num_decode_tokens, step.verified) == (3, 9, 8, 3)
    assert step.num_accepted_tokens_per_pos == (2, 2, 1)


def test_requests_without_a_draft_do_not_count_as_rejections():
    step = counted({"a": [1, 2], "b": [1]}, (2, 2, 1), drafted=2)
    assert (step.num_drafts, step.num_draft_tokens, step.num_accepted_tokens_per_pos) == (2, 3, (2, 0))
    assert not step.clean


def test_requests_that_ended_or_got_nothing_do_not_count():
    drafts = dict.fromkeys(ROWS, (1, 2))
    ended = counted(drafts, (2, 3, 1), drafted=2, gone={"b"})
    assert (ended.num_drafts, ended.num_draft_tokens, ended.num_accepted_tokens_per_pos) == (2, 4, (1, 0))
    empty = counted(drafts, (2, 0, 1), drafted=2)
    assert (empty.num_drafts, empty.num_draft_tokens, empty.num_accepted_tokens_per_pos) == (2, 4, (1, 0))


def test_rows_are_found_by_request_and_not_by_order():
    step = counted({"a": [1, 2]}, (3, 1), drafted=2, rows={"a": 1, "x": 0})
    assert step.num_accepted_tokens_per_pos == (0, 0)


def test_a_step_without_drafts_verified_nothing():
    step = counted({}, (), drafted=2, before=2, given={"a": 1, "b": 1, "c": 1})
    assert (step.verified, step.num_drafts, step.num_accepted_tokens_per_pos, step.num_decode_tokens) == (0, 0, (), 3)


@pytest.mark.parametrize(("paused_s", "latency_s"), [(0.0, 0.12), (0.005, 0.12), (0.05, 0.02)])
def test_a_pause_before_a_step_is_not_its_time(paused_s, latency_s):
    step = counted(paused_s=paused_s)
    assert step.latency_s == pytest.approx(latency_s) and step.decode_only == step.clean == (paused_s < 0.01)


@pytest.mark.parametrize("drafted", [OFF, 0, 3])
def test_a_step_as_chosen_is_clean(drafted):
    assert counted(WHOLE if drafted > 0 else {}, drafted=drafted).clean


@pytest.mark.parametrize("fields", [{"before": 1}, {"blocked": True}])
def test_a_step_that_drafts_otherwise_than_it_verifies_is_not(fields):
    assert not counted(**fields).clean


@pytest.mark.parametrize(("cut", "counted_as"), [(False, 9), (True, 7)])
def test_tokens_that_vllm_cut_at_a_requests_end_were_not_given(cut, counted_as):
    step = counted(sampled=(4, 4, 1), given={"a": 2, "b": 4, "c": 1}, cut=cut)
    assert step.num_decode_tokens == counted_as
