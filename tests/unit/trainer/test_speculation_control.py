"""Who decodes the coming rollout without drafts: OFF by the calibration, drafting that does not pay."""

import pytest

from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.off import FIRST_WAIT, IN_A_ROW
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.speculation_control import SpeculationControl

REPLICAS = ["a", "b"]
UNKNOWN = ()
"""Acceptance of a drafter."""


def control(**settings):
    return SpeculationControl(REPLICAS, SpeculationConfig(**settings))


@pytest.mark.parametrize(("policy", "times"), [("live_table", 1), ("fixed", 0), ("off", 0)])
def test_that_no_draft_was_measured_is_said_once(said, policy, times):
    live = control(policy=policy)
    live.calibrated(LatencyTable.calibrated({OFF: [(4, 0.01)], 0: [(4, 0.011)]}))
    for step in range(3):
        assert bool(live.undrafted(step, (0.8, 0.7))) == bool(live.off) == (policy != "fixed")
        live.rollout_ended({})
    assert said.text.count("no step with a draft") == times


def test_drafting_is_switched_off_where_it_loses_and_one_replica_tries_again(said):
    live = control()
    slow = EngineStats(num_drafts=1000, steps_by_draft_length={3: 100}, decode_s=2.0, undrafted_s=1.0)
    for step in range(IN_A_ROW):
        assert live.undrafted(step, UNKNOWN) == []
        assert live.rollout_ended(dict.fromkeys(REPLICAS, slow)) == -1.0
    assert live.disabled and said.text.count("Drafting is switched off") == 1
    for step in range(FIRST_WAIT):
        assert live.undrafted(step, UNKNOWN) == REPLICAS and live.off == live.disabled
        live.rollout_ended({})
    assert live.undrafted(20, UNKNOWN) == ["b"] and not live.off
