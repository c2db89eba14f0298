"""n-gram drafts between index, scheduler and sampler, on records shaped like vLLM's."""

from types import SimpleNamespace

import pytest
import torch

from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.messages.rollout import NGRAM_MARK, EngineStats
from verl_tlt.speculation.ngram_index import NgramIndex
from verl_tlt.vllm_worker.draft_probabilities import verify_as_certain
from verl_tlt.vllm_worker.drafter_pass import NoProposals


def step(new=(), drafts=None):
    """A `SchedulerOutput`, as far as it is read."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, prompt_token_ids=[50, 51, 52, 53]) for r in new],
        finished_req_ids=set(),
        scheduled_spec_decode_tokens=drafts or {},
    )


def request(draft=(7, 7), prefilling=False, grammar=None):
    return SimpleNamespace(spec_token_ids=list(draft), is_prefill_chunk=prefilling, structured_output_request=grammar)


def emitted(**tokens):
    return [SimpleNamespace(request_id=r, new_token_ids=new) for r, new in tokens.items()]


@pytest.fixture(params=[True, False], ids=["alone", "beside"])
def drafts(request):
    made = NgramDrafts(NgramIndex(1 << 20), without_drafter=request.param)
    made.scheduled(step(new=["old", "now"]))
    made.emitted(emitted(old=[1, 2, 3, 4, 5, 6], now=[1, 2, 3]))
    return made


def marked(drafts, scheduled):
    """The requests that a step with these drafts names."""
    output = step(drafts=scheduled)
    drafts.scheduled(output)
    return set(getattr(output, NGRAM_MARK))


def test_a_match_replaces_the_drafters_proposal_and_is_marked_in_the_next_step(drafts):
    requests = {"now": request()}
    drafts.propose(requests, ["now", "gone"], 2)
    assert requests["now"].spec_token_ids == [4, 5]
    assert marked(drafts, {"now": [4, 5]}) == {"now"}
    assert marked(drafts, {"now": [7]}) == set()
    drafts.propose(requests, ["now"], 2)
    assert marked(drafts, {}) == set(), "it was left out"


def test_without_a_match_the_drafter_has_its_way(drafts):
    requests = {"now": request()}
    drafts.emitted(emitted(now=[90]))
    drafts.propose(requests, ["now"], 2)
    assert requests["now"].spec_token_ids == ([] if drafts.without_drafter else [7, 7])


def test_a_draft_shorter_than_the_drafters_is_taken_only_where_there_is_no_other(drafts):
    requests = {"now": request(draft=[7] * 5)}
    drafts.propose(requests, ["now"], 5)
    assert requests["now"].spec_token_ids == ([4, 5, 6] if drafts.without_drafter else [7] * 5)


@pytest.mark.parametrize(("changes", "draft_length"), [({"prefilling": True}, 2), ({"grammar": object()}, 2), ({}, 0)])
def test_who_gets_no_ngram(drafts, changes, draft_length):
    one = request((), **changes)
    drafts.propose({"now": one}, ["now"], draft_length)
    assert one.spec_token_ids == []


def test_ngrams_that_are_refused_stop_and_the_drafter_sets_the_bar(drafts):
    offers, refused = 0, True
    while refused:
        one = request()
        drafts.propose({"now": one}, ["now"], 2)
        output = step(drafts={"now": one.spec_token_ids, "old": [9, 9]})
        drafts.scheduled(output)
        if refused := "now" in getattr(output, NGRAM_MARK):
            drafts.verified(output, [[4], [9, 9, 8]], {"now": 0, "old": 1})
            offers += 1
    assert (drafts.num_drafts, drafts.num_accepted) == (offers, 0) and offers >= 3
    # Alone down to the floor; beside a drafter that is always right it ends earlier.
    assert offers > 12 if drafts.without_drafter else offers <= 8


def test_what_was_verified_counts_since_the_last_reset(drafts):
    drafts.num_drafts, drafts.num_accepted = 5, 3
    for reset, counts in ((False, (5, 3)), (True, (5, 3)), (True, (0, 0))):
        stats = drafts.counted(EngineStats(num_drafts=9), reset)
        assert (stats.num_drafts, stats.num_ngram_drafts, stats.num_ngram_accepted) == (9, *counts)


def test_the_empty_proposer_proposes_nothing():
    proposer = NoProposals(None)
    proposer.load_model(None)
    assert proposer.propose([[1, 2], [], [3]], None, slot_mappings=None) == [[], [], []]


def test_marked_rows_are_verified_with_probability_one():
    probs, seen = torch.full((5, 4), 0.25), []
    metadata = SimpleNamespace(num_draft_tokens=[2, 0, 3], draft_token_ids=torch.tensor([1, 2, 3, 0, 1]))
    runner = SimpleNamespace(
        execute_model=lambda output: seen.append(output) or "done",
        _get_spec_decode_draft_probs=lambda _: probs.clone(),
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"]),
    )
    verify_as_certain(runner)
    plain, marked = step(), step()
    assert runner.execute_model(plain) == "done" and seen == [plain]
    assert torch.equal(runner._get_spec_decode_draft_probs(metadata), probs)
    setattr(marked, NGRAM_MARK, {"c": None})
    runner.execute_model(marked)
    found = runner._get_spec_decode_draft_probs(metadata)
    assert torch.equal(found[:2], probs[:2])
    assert torch.equal(found[2:], torch.nn.functional.one_hot(torch.tensor([3, 0, 1]), 4).float())
    with pytest.raises(RuntimeError, match="use source=eagle"):
        verify_as_certain(SimpleNamespace())
