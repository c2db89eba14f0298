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
    assert said.text.count("no step with a draft") == times and bool(live.undrafted_since) == (policy != "fixed")


def rollout(seconds, drafting):
    """A rollout of 400 tokens at batch 4 by each replica; those that draft take so many seconds, others one."""
    return {
        name: EngineStats(
            num_steps=100,
            num_drafts=1000 if name in drafting else 0,
            num_accepted_tokens_per_pos=(800,),
            steps_by_draft_length={3 if name in drafting else OFF: 100},
            tokens_by_batch={4: 400},
            decode_s=seconds if name in drafting else 1.0,
            undrafted_s=1.0,
        )
        for name in REPLICAS
    }


def test_drafting_is_switched_off_where_it_loses_and_on_by_a_replica_that_gains(said):
    """Rollouts that decode at half the speed of decoding without drafts, then a trial at twice that speed."""
    live = control()
    for step in range(IN_A_ROW):
        assert live.undrafted(step, UNKNOWN) == []
        assert live.rollout_ended(rollout(2.0, REPLICAS)) == -1.0
    assert live.disabled and said.text.count("Drafting is switched off") == 1
    for step in range(3, 3 + FIRST_WAIT):
        assert live.undrafted(step, UNKNOWN) == REPLICAS
        assert live.rollout_ended(rollout(1.0, [])) == 0.0
    assert live.undrafted(20, UNKNOWN) == ["b"]
    assert live.rollout_ended(rollout(0.5, ["a"])) == 0.0, "the other one ends when it would have"
    assert "Drafting is switched on again" in said.text
    assert live.undrafted(21, UNKNOWN) == [] and not live.off
