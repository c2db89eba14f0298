"""Who decodes the coming rollout without drafts, live: control rollouts, speculation disabled and enabled."""

import pytest

from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats, LoadInterval
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.decision import FIRST_WAIT
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.speculation_control import SpeculationControl

REPLICAS = ["a", "b"]
UNKNOWN, RANDOM = (), (0.01, 0.01)
"""Acceptance of drafters."""


def control(shared=False, **settings):
    config = SpeculationConfig(**{"control_every": 0} | settings)
    return SpeculationControl(REPLICAS, config, shared, active_share=1.0)


def test_where_nobody_drafts_there_is_nothing_to_measure(tmp_path):
    live = control(control_every=1, shared=True)
    assert live.undrafted(1, RANDOM) == REPLICAS and live.may_train and "next to nothing" in live.off


@pytest.mark.parametrize(("policy", "times"), [("goodput", 1), ("fixed", 0), ("off", 0)])
def test_that_no_draft_was_measured_is_said_once(tmp_path, said, policy, times):
    live = control(policy=policy)
    live.calibrated(LatencyTable.calibrated({OFF: [(4, 0.01)], 0: [(4, 0.011)]}))
    for step in range(3):
        assert bool(live.undrafted(step, (0.8, 0.7))) == bool(live.off) == (policy != "fixed")
        live.rollout_ended({})
    assert said.text.count("tlt.speculation.arms") == times and bool(live.undrafted_since) == (policy != "fixed")


def test_a_rollout_that_one_replica_tries_alone_needs_no_control():
    live = control(control_every=None)
    live.calibrated(LatencyTable.calibrated({k: [(4, s)] for k, s in {OFF: 0.01, 0: 0.0105, 3: 0.0155}.items()}))
    some, good = (0.5, 0.2, 0.1), (0.9, 0.9, 0.9)  # 4 % of OFF's time saved, and more
    for step in range(1, 9):
        assert live.undrafted(step, good) == []
        live.rollout_ended({})
    assert live.undrafted(9, some) == ["b"] and not live.control
    assert live.undrafted(9, good) == ["a"] == list(live.control)
    live.rollout_ended({})
    assert live.undrafted(10, good) == []


def rollout(begin, seconds, drafting, context=50.0):
    """A rollout of 400 tokens at batch 4 by each replica; those that draft take so many seconds, others one."""
    stats = {}
    for name in REPLICAS:
        drafts, spent = name in drafting, seconds if name in drafting else 1.0
        interval = LoadInterval(begin, begin + spent, 4.0, context, spent, 100.0, not drafts)
        stats[name] = EngineStats(
            num_drafts=1000 * drafts, num_accepted_tokens_per_pos=(800 * drafts,), tokens_by_batch={4: 400},
            steps_by_draft_length={2 if drafts else OFF: 100}, load_intervals=(interval,),
        )  # fmt: skip
    return stats


def test_responses_that_outgrow_what_was_measured_are_measured_soon(tmp_path):
    live, controlled = control(control_every=None), []
    for step in range(1, 40):
        undrafted = live.undrafted(step, UNKNOWN)
        controlled += [step] if undrafted else []
        drafting = [name for name in REPLICAS if name not in undrafted]
        saved_s = live.rollout_ended(rollout(10.0 * step, 0.5, drafting, context=50.0 if step <= 20 else 5000.0))
        assert (saved_s is None) == (step < 9 or 20 < step < 27)
    assert controlled == [9, 18, 27] and saved_s == pytest.approx(0.5)


def test_speculation_is_disabled_where_it_loses_and_enabled_by_a_probe(tmp_path, said):
    """Rollouts that decode at half the speed of decoding without drafts, then a probe at twice that speed."""
    live = control()
    live.calibrated(LatencyTable.calibrated({OFF: [(1, 0.01), (8, 0.01)]}))
    for step, drafting in enumerate((REPLICAS, ["b"], ["a"])):
        assert live.undrafted(step, UNKNOWN) == [name for name in REPLICAS if name not in drafting]
        assert live.rollout_ended(rollout(10.0 * step, 2.0, drafting)) == pytest.approx(-1.0)
    assert live.disabled and said.text.count("Speculation is disabled") == 1
    for step in range(3, 3 + FIRST_WAIT):
        assert live.undrafted(step, UNKNOWN) == REPLICAS
        assert live.rollout_ended(rollout(10.0 * step, 1.0, [])) == 0.0
    assert live.undrafted(20, UNKNOWN) == ["a"]
    assert live.rollout_ended(rollout(200.0, 0.5, ["b"])) == 0.0, "the other one ends when it would have"
    assert "Speculation is enabled again" in said.text
    assert live.undrafted(21, UNKNOWN) == [] and not live.off
