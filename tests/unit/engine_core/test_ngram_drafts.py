"""n-gram drafts between index and scheduler, on records shaped like vLLM's."""

from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.speculation.ngram_index import LONGEST, NgramIndex


def step(new=()):
    """A `SchedulerOutput`, as far as it is read."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, prompt_token_ids=[50, 51, 52, 53]) for r in new],
        finished_req_ids=set(),
    )


def request(prefilling=False):
    return SimpleNamespace(spec_token_ids=[], is_prefill_chunk=prefilling)


def emitted(**tokens):
    return [SimpleNamespace(request_id=r, new_token_ids=new) for r, new in tokens.items()]


@pytest.fixture
def drafts():
    made = NgramDrafts(NgramIndex(1 << 20))
    made.scheduled(step(new=["old", "now"]))
    made.emitted(emitted(old=[1, 2, 3, 4, 5, 6], now=[1, 2, 3]))
    return made


def proposed(drafts, draft_length, one=None):
    one = one or request()
    drafts.propose({"now": one}, ["now", "gone"], draft_length)
    return one.spec_token_ids


def test_a_match_is_drafted_as_far_as_it_goes(drafts):
    assert [proposed(drafts, k) for k in (0, 2, 5)] == [[], [4, 5], [4, 5, 6]]
    assert proposed(drafts, 2, request(prefilling=True)) == []
    drafts.emitted(emitted(now=[90]))
    assert proposed(drafts, 2) == [], "nothing matches"


def test_ngrams_that_are_refused_stop(drafts):
    offers = 0
    while tokens := proposed(drafts, 2):
        drafts.verified({"now": tokens}, [1], {"now": 0})
        offers += 1
        assert offers < 100
    assert offers > 12


def test_a_draft_that_got_no_answer_teaches_nothing(drafts):
    def trusted():
        return [drafts.index.trust.of(matched) for matched in range(LONGEST + 1)]

    tokens, before = proposed(drafts, 2), trusted()
    drafts.verified({"now": tokens}, [0], {"now": 0})
    drafts.verified({"now": tokens}, [1], {"now": 0})
    assert trusted() == before
    drafts.verified({"now": proposed(drafts, 2)}, [1], {"now": 0})
    assert trusted() != before
