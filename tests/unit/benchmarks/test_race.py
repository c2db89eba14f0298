"""Races of draft lengths: rounds of several machines are judged together."""

import pytest

from benchmarks.control.drains import ARMS, FEWEST, LONGEST, OURS, Drain
from benchmarks.control.fixed import _expected, missing, published
from verl_tlt.speculation.types import OFF

LOAD = Drain(short=10, long=1, longest=900)
LEAD = 1.2


def race_of(rounds, fixed_s, per_request_s):
    """A race on a machine with such steps. Drafts are free and useless there, and ours is `LEAD` times as fast.

    Each arm has responses of other lengths.
    """
    near = [
        {"batch": batch, "kv_tokens": 32 * batch, "draft_length": k, "seconds": fixed_s + per_request_s * batch}
        for batch in (1, 11)
        for k in (OFF, *range(LONGEST + 1))
    ]
    race = {"race": str(fixed_s), "acceptance": [0.0] * LONGEST, "prompt_tokens": 30, "near": near, "far": []}
    drain = {}
    for i, arm in enumerate(ARMS):
        lengths = [*[60 + 20 * i] * 10, 900 - 90 * i]
        seconds = (1.0 if arm == OURS else LEAD) * _expected(race, lengths, arm)
        drain[arm] = {"seconds": seconds, "lengths": lengths}
    return {**race, "loads": {str(LOAD): {"predicted": {}, "rounds": [drain] * rounds}}}


def test_rounds_of_several_machines_are_judged_together_each_by_its_own_step_costs():
    races = [race_of(FEWEST // 2, 0.05, 0.0), race_of(FEWEST // 2, 0.01, 0.02)]
    found = published(races)["loads"][str(LOAD)]
    assert found["rounds"] == FEWEST and "a chosen K beats every fixed K here" in found["verdict"]
    for ratio in found["over"]["adjusted"].values():
        assert ratio == pytest.approx([LEAD] * 3, rel=1e-3)
    assert found["over"]["plain"]["off"][0] != pytest.approx(LEAD, rel=0.02)
    assert "it is not claimed" in published(races[:1])["loads"][str(LOAD)]["verdict"]


def test_a_race_goes_on_with_the_rounds_that_others_lack():
    races, equal = [race_of(2, 0.05, 0.0), race_of(1, 0.01, 0.02)], Drain(4, 0, 400, equal=True)
    assert missing(races, [LOAD, equal], 4) == [(0, equal), (1, equal), (2, equal), (3, LOAD), (3, equal)]
    assert not missing(races, [LOAD], 3)
