"""The index of sibling responses: what it proposes, what it forgets, and what it costs."""

import random
import tracemalloc
from itertools import pairwise

import pytest

from verl_tlt.speculation.ngram_index import CANDIDATES, LONGEST, NGRAM_BYTES, SHORTEST, NgramIndex, Trust

PROMPT = [50, 51, 52, 53]
OTHER = [60, 61, 62, 63]


@pytest.fixture
def index():
    return NgramIndex(max_bytes=1 << 20)


def proposed(index, request, length=3, least=0.0):
    found = index.propose(request, length, least)
    return found.tokens if found else None


def running(index, request, tokens, prompt=PROMPT):
    index.begin(request, prompt)
    index.extend(request, tokens)


def respond(index, request, tokens, prompt=PROMPT):
    running(index, request, tokens, prompt)
    index.end(request)


def test_a_response_is_drafted_from_its_finished_sibling(index):
    respond(index, "a", [1, 2, 3, 4, 5, 6, 7])
    respond(index, "other", [1, 2, 9, 10], OTHER)
    index.begin("b", PROMPT)
    said = [([], [1, 2, 3]), ([1, 2], [3, 4, 5]), ([9], None), ([4, 5, 6], [7])]
    for more, found in said:  # the prompt's end is matched too; other prompts are not quoted
        index.extend("b", more)
        assert proposed(index, "b") == found


def test_a_response_quotes_itself_and_its_prompt(index):
    running(index, "a", [1, 2, 3, 4, 1, 2, 3], [7, 8, 9, 10, 11, *PROMPT])
    assert proposed(index, "a") == [4, 1, 2]
    index.extend("a", [7, 8, 9])
    assert proposed(index, "a", 2) == [10, 11]


def test_the_longest_match_wins_and_then_the_latest(index):
    for name, tokens in (("a", [1, 2, 3, 4, 10]), ("b", [9, 2, 3, 4, 20]), ("c", [8, 2, 3, 4, 30])):
        respond(index, name, tokens)
    running(index, "d", [1, 2, 3, 4])
    assert index.propose("d", 1) == ([10], min(LONGEST, len(PROMPT) + 4))
    index.extend("d", [77, 2, 3, 4])
    assert index.propose("d", 1) == ([77], SHORTEST), "the latest is its own"


def test_the_previous_epoch_is_quoted_and_the_one_before_it_is_not(index):
    for epoch in range(3):
        respond(index, f"e{epoch}", [10 * epoch + digit for digit in (1, 2, 3, 4)])
        index.new_policy()
    index.begin("now", PROMPT)
    for epoch, found in ((2, [24]), (1, None), (0, None)):
        index.extend("now", [10 * epoch + digit for digit in (1, 2, 3)])
        assert proposed(index, "now", 1) == found


def test_an_epoch_that_is_forgotten_is_not_counted():
    def bytes_after(epochs):
        index = NgramIndex(max_bytes=1 << 20)
        for epoch in epochs:
            respond(index, f"e{epoch}", [10 * epoch + digit for digit in (1, 2, 3, 4)])
            index.new_policy()
        index.begin("now", PROMPT)
        return index.bytes

    assert bytes_after(range(3)) == bytes_after(range(1, 3))


def test_of_two_rollouts_the_latest_is_quoted_where_both_match_alike(index):
    respond(index, "a", [1, 2, 3, 10])
    index.new_policy()
    respond(index, "b", [1, 2, 3, 20])
    running(index, "c", [1, 2, 3])
    assert proposed(index, "c", 1) == [20]


def test_responses_across_a_policy_change_share_their_rollout(index):
    running(index, "a", [1, 2, 3, 4])
    index.new_policy()  # partial rollouts: "a" still runs
    running(index, "b", [1, 2, 3])
    assert proposed(index, "b", 1) == [4]


def test_memory_is_bounded_and_counted_about_right():
    rng, index = random.Random(0), NgramIndex(max_bytes=400_000)
    tracemalloc.start()
    prompts = []
    for i in range(60):
        respond(index, f"r{i}", [rng.randrange(30_000) for _ in range(300)], prompt=[i, i + 1, i + 2, i + 3])
        prompts.append(len(index._histories))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.bytes <= index.max_bytes
    assert 0.5 * held < index.bytes < 1.6 * held
    assert 0 < len(index._histories) < 60
    assert any(after < before for before, after in pairwise(prompts)), "a tenth is forgotten at once"
    index.begin("again", [59, 60, 61, 62])  # the latest is still there
    assert proposed(index, "again") is not None


@pytest.mark.parametrize(("spare", "kept"), [(0, 2), (-1, 1)])
def test_as_much_as_is_allowed_is_kept_and_no_byte_more(spare, kept):
    def follow(index):
        respond(index, "a", [1, 2, 3, 4])
        running(index, "b", [5, 6, 7], OTHER)
        return index

    index = follow(NgramIndex(follow(NgramIndex(1 << 20)).bytes + spare))
    assert len(index._histories) == kept


def test_requests_that_run_are_never_forgotten_but_followed_no_further():
    index = NgramIndex(max_bytes=60 * NGRAM_BYTES)
    running(index, "a", [1, 2, 3, 4])
    index.extend("a", range(100, 200))
    index.extend("a", [1, 2, 3])
    assert proposed(index, "a") is None
    assert index.bytes < 200 * NGRAM_BYTES
    index.end("a")
    index.end("never seen")


@pytest.mark.parametrize(("others", "found"), [(CANDIDATES - 2, 10), (CANDIDATES - 1, 20)])
def test_only_the_latest_places_of_an_ngram_are_looked_at(index, others, found):
    """The context's own place is one of them."""
    respond(index, "a", [1, 2, 3, 4, 10])
    for sibling in range(others):
        respond(index, f"b{sibling}", [9, 2, 3, 4, 20])
    running(index, "c", [1, 2, 3, 4])
    assert proposed(index, "c", 1) == [found]


def test_a_context_shorter_than_an_ngram_matches_nothing(index):
    index.begin("a", [50, 51])
    assert proposed(index, "a") is None
    index.extend("a", [52])
    assert proposed(index, "a") is None  # now long enough, and said once


def test_a_match_is_compared_up_to_the_longest_and_trusted_by_its_length(index):
    said = list(range(100, 100 + 2 * LONGEST))
    respond(index, "a", [*said, 7])
    running(index, "b", said)
    assert index.propose("b", 1).matched == LONGEST and Trust().of(LONGEST) == 1.0
    for _ in range(4):
        index.trust.learn(LONGEST, False)
    assert index.trust.of(LONGEST) == 0.5 and proposed(index, "b", 1, least=0.6) is None
    assert proposed(index, "b", 1, least=0.5) == [7]
    index.new_policy()
    assert proposed(index, "b", 1, least=0.6) == [7], "as good as before"
