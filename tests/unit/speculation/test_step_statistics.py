"""Drafts counted by the length their response reached, worked out by hand."""

from verl_tlt.messages.rollout import ResponseDrafts
from verl_tlt.speculation.step_statistics import DraftsByLength
from verl_tlt.speculation.types import Step


def step(accepted=(), ended=()):
    return Step(1, 9, 2, 2, accepted=accepted, ended=ended)


def test_drafts_count_for_the_length_their_response_reached():
    drafts = DraftsByLength()
    drafts.add(step([("short", 0), ("long", 3)]))
    drafts.add(step([("long", 1)]))
    drafts.add(step(ended=[("short", 10)]))
    drafts.add(step(ended=[("undrafted", 10)]))
    assert drafts.rows() == (ResponseDrafts(2, 20, 1, 0),)
    drafts.add(step([("long", 2)]))
    drafts.add(step(ended=[("long", 500)]))
    assert drafts.rows(reset=True) == (ResponseDrafts(2, 20, 1, 0), ResponseDrafts(1, 500, 3, 6))
    assert drafts.rows() == ()


def test_a_reset_keeps_what_is_in_flight():
    drafts = DraftsByLength()
    drafts.add(step([("a", 2)]))
    drafts.rows(reset=True)
    drafts.add(step([("a", 1)]))
    drafts.add(step(ended=[("a", 64)]))
    assert drafts.rows() == (ResponseDrafts(1, 64, 2, 3),)


def test_a_request_that_ends_without_a_token_is_forgotten():
    drafts = DraftsByLength()
    drafts.add(step([("a", 2)]))
    drafts.add(step(ended=[("a", 0)]))
    drafts.add(step(ended=[("a", 7)]))
    assert drafts.rows() == (ResponseDrafts(1, 7, 0, 0),), "its earlier namesake's draft does not count"


def test_lengths_within_a_twelfth_share_a_row_and_there_are_few_rows():
    drafts = DraftsByLength()
    for tokens in range(1, 32_769):
        drafts.add(step(ended=[("r", tokens)]))
    rows = drafts.rows()
    assert sum(row.responses for row in rows) == 32_768
    assert len(rows) <= 8 * 15 + 1
    means = [row.num_tokens / row.responses for row in rows]
    assert means == sorted(means)
