"""The alarm of a served drafter that is accepted far less than on held-out text."""

import pytest

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.alarm import falls_short


def engine(drafts, first):
    return EngineStats(num_drafts=drafts, num_accepted_tokens_per_pos=(first, 0))


@pytest.mark.parametrize(
    ("stats", "held_out", "alarm"),
    [
        ([engine(400, 300), engine(400, 280)], (0.8, 0.7), False),
        ([engine(400, 300), engine(400, 10)], (0.8, 0.7), True),  # one engine of two serves something else
        ([engine(400, 0)], (0.8, 0.7), True),
        ([engine(400, 170)], (0.8, 0.7), False),  # other texts than those held out
        ([engine(100, 0)], (0.8, 0.7), False),  # too few to tell
        ([engine(400, 0)], (), False),  # nothing is known of it
        ([engine(400, 0)], (0.0, 0.0), False),  # a random head
        ([], (0.8,), False),
    ],
)
def test_far_below_what_was_held_out_is_an_alarm(stats, held_out, alarm):
    said = falls_short(stats, held_out)
    assert (said is not None) == alarm
    assert not alarm or ("of another policy" in said and "80% on held-out text" in said)
