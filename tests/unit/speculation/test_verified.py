from verl_tlt.engine_core.verified import NOTHING, count_verified

ROWS = {"a": 0, "b": 1, "c": 2}


def count(drafts, sampled, gone=()):
    scheduled = {r: 1 + len(drafts.get(r, ())) for r in ROWS}
    return count_verified(scheduled, drafts, sum(scheduled.values()), sampled, ROWS, gone)


def test_positions_count_every_draft_that_got_as_far():
    seen = count({"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}, [[9], [9, 9, 9], [9, 9, 9, 9]])
    assert (seen.num_drafts, seen.num_draft_tokens, seen.tokens) == (3, 9, 8)
    assert seen.num_accepted_tokens_per_pos(3) == (2, 2, 1)


def test_requests_without_a_draft_do_not_count_as_rejections():
    seen = count({"a": [1, 2], "b": [1]}, [[9, 9], [9, 9], [9]])
    assert (seen.num_drafts, seen.num_draft_tokens, seen.tokens) == (2, 3, None)
    assert seen.num_accepted_tokens_per_pos(2) == (2, 0)


def test_requests_that_ended_or_got_nothing_do_not_count():
    drafts = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    ended = count(drafts, [[9, 9], [9, 9, 9], [9]], gone={"b"})
    assert (ended.num_drafts, ended.num_draft_tokens, ended.num_accepted_tokens_per_pos(2)) == (2, 4, (1, 0))
    empty = count(drafts, [[9, 9], [], [9]])
    assert (empty.num_drafts, empty.num_draft_tokens, empty.num_accepted_tokens_per_pos(2)) == (2, 4, (1, 0))


def test_rows_are_found_by_request_and_not_by_order():
    seen = count_verified({"x": 1, "a": 3}, {"a": [1, 2]}, 4, [[9, 9, 9], [9]], {"a": 0, "x": 1}, ())
    assert seen.num_accepted_tokens_per_pos(2) == (1, 1)


def test_a_step_without_drafts_is_nothing():
    assert count({}, [[9], [9], [9]]) is NOTHING
    assert NOTHING.num_accepted_tokens_per_pos(0) == ()
