"""Drafts of structured output between scheduler and grammar, on records shaped like vLLM's."""

from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.grammar_drafts import GrammarDrafts


def request(left, grammar=True, prefilling=False):
    """A request whose draft vLLM has cut to `left`."""
    structured = object() if grammar else None
    return SimpleNamespace(spec_token_ids=list(left), structured_output_request=structured, is_prefill_chunk=prefilling)


def drafts(**rows):
    return SimpleNamespace(req_ids=list(rows), draft_token_ids=list(rows.values()))


def step(structured=True, **rows):
    return SimpleNamespace(
        scheduled_spec_decode_tokens=rows, num_scheduled_tokens={}, has_structured_output_requests=structured
    )


def told(*allowed, of):
    """What vLLM 0.32 says to its V2 runner."""
    return SimpleNamespace(structured_output_request_ids=list(of), num_acceptable_drafts=list(allowed))


@pytest.fixture
def kept():
    """What an engine keeps once it has scheduled a request with structured output."""
    made = GrammarDrafts()
    made.marked(step())
    return made


def test_a_cut_draft_is_verified_whole_and_the_grammar_is_told_where_it_ends(kept):
    requests = {"cut": request([5]), "allowed": request([5, 6]), "free": request([7, 8], grammar=False)}
    kept.keep_whole(requests, drafts(cut=[5, 6, 7], allowed=[5, 6], free=[7, 8], gone=[1]))
    assert [requests[name].spec_token_ids for name in ("cut", "allowed", "free")] == [[5, 6, 7], [5, 6], [7, 8]]
    output = step(cut=[5, 6, 7], free=[7, 8])
    assert kept.marked(output).scheduled_spec_decode_tokens == {"cut": [5, -1, -1], "free": [7, 8]}
    assert output.scheduled_spec_decode_tokens["cut"] == [5, 6, 7], "the workers verify what was drawn"


def test_only_the_latest_draft_of_a_request_counts(kept):
    requests = {"a": request([]), "b": request([])}
    kept.keep_whole(requests, drafts(a=[1, 2], b=[1, 2]))
    requests["a"].spec_token_ids = [3, 4]
    del requests["b"]
    kept.keep_whole(requests, drafts(a=[3, 4]))
    output = step(a=[3, 4], b=[9])
    assert kept.marked(output) is output


def test_a_request_that_computes_its_prompt_has_no_draft(kept):
    requests = {"a": request([], prefilling=True)}
    kept.keep_whole(requests, drafts(a=[1, 2]))
    assert requests["a"].spec_token_ids == []


def test_drafts_stay_cut_until_a_step_had_structured_output():
    kept, requests = GrammarDrafts(), {"a": request([5])}
    for steps, whole in (([False], [5]), ([True, False], [5, 6])):  # the last one is of a pipeline's other half
        for structured in steps:
            kept.marked(step(structured))
        kept.keep_whole(requests, drafts(a=[5, 6]))
        assert requests["a"].spec_token_ids == whole


def test_the_v2_runner_verifies_the_first_forbidden_draft_if_it_is_known(kept):
    requests = {"cut": request([5]), "allowed": request([5, 6]), "unknown": request([])}
    kept.keep_whole(requests, drafts(cut=[5, 6, 7], allowed=[5, 6], unknown=[-1, -1]))
    assert kept.with_first_forbidden(told(1, 2, 0, of=requests)).num_acceptable_drafts == [2, 2, 0]
    kept.keep_whole(requests, drafts(cut=[5]))  # nothing is cut from the next one
    assert kept.with_first_forbidden(told(1, of=["cut"])).num_acceptable_drafts == [1]


def test_asynchronous_scheduling_marks_drafts_in_the_step():
    kept, rows = GrammarDrafts(), {"cut": [5, 6, 7], "allowed": [5, 6], "unknown": [-1, -1], "undrafted": [8]}
    kept.note_marks(step(cut=[5, -1, -1], allowed=[5, 6], unknown=[-1, -1]), list(rows), list(rows.values()))
    assert kept.with_first_forbidden(told(1, 2, 0, 0, of=rows)).num_acceptable_drafts == [2, 2, 0, 0]
    assert kept.with_first_forbidden(told(1, of=["cut"])).num_acceptable_drafts == [1], "of that step alone"


def test_a_release_that_is_told_nothing_of_them_is_left_alone(kept):
    output = SimpleNamespace(structured_output_request_ids=["a"])
    assert kept.with_first_forbidden(output) is output
    assert kept.with_first_forbidden(None) is None


def test_nothing_is_kept_of_requests_that_are_gone_or_were_handed_on(kept):
    kept.keep_whole({"done": request([]), "next": request([])}, drafts(done=[1, 2], next=[1, 2]))
    kept.with_first_forbidden(SimpleNamespace(structured_output_request_ids=["next"]))  # a release without the count
    kept.keep_whole({"next": request([1, 2])}, drafts(next=[1, 2]))
    found = kept.with_first_forbidden(told(0, 0, of=["done", "next"]))
    assert found.num_acceptable_drafts == [0, 0], "a request may come back by the same name"
