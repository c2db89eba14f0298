"""Races of draft lengths: rounds of several machines are judged together."""

import pytest

from benchmarks.control.drains import ARMS, FEWEST, LONGEST, OURS, Drain
from benchmarks.control.fixed import missing, published
from verl_tlt.speculation.types import OFF

LOAD = Drain(short=10, long=1, longest=900)
LENGTHS = (*[60] * 10, 900)
LEAD = 1.2


def race_of(rounds, scale):
    """A race on a machine whose steps take `scale` times as long; ours is `LEAD` times as fast as every other arm."""
    near = [
        {"batch": batch, "kv_tokens": 32 * batch, "draft_length": k, "seconds": scale * (0.05 + 0.01 * batch)}
        for batch in (1, 11)
        for k in (OFF, *range(LONGEST + 1))
    ]
    drains = [
        {arm: {"seconds": scale * (10.0 + i) * (1.0 if arm == OURS else LEAD), "lengths": LENGTHS} for arm in ARMS}
        for i in range(rounds)
    ]
    known = {"acceptance": [0.7] * LONGEST, "prompt_tokens": 30, "near": near, "far": []}
    return {"race": str(scale), **known, "loads": {str(LOAD): {"predicted": {}, "rounds": drains}}}


def test_rounds_of_several_machines_are_judged_together():
    races = [race_of(FEWEST // 2, 1.0), race_of(FEWEST // 2, 3.0)]
    found = published(races)["loads"][str(LOAD)]
    assert found["rounds"] == FEWEST and "a chosen K beats every fixed K here" in found["verdict"]
    for ratio in (*found["over"]["plain"].values(), *found["over"]["adjusted"].values()):
        assert ratio == pytest.approx([LEAD] * 3, rel=1e-3)
    assert "it is not claimed" in published(races[:1])["loads"][str(LOAD)]["verdict"]


def test_a_race_goes_on_with_the_rounds_that_others_lack():
    races, equal = [race_of(2, 1.0), race_of(1, 3.0)], Drain(4, 0, 400, equal=True)
    assert missing(races, [LOAD, equal], 4) == [(0, equal), (1, equal), (2, equal), (3, LOAD), (3, equal)]
    assert not missing(races, [LOAD], 3)
