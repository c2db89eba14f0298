"""Speculation that does not pay is stopped with its likely cause, and goes on with evidence alone."""

import logging

import pytest

from verl_tlt.messages.rollout import Calibration, EngineStats, LoadInterval
from verl_tlt.speculation.baseline import Savings
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.payoff import FIRST_PROBE, IN_A_ROW, LONGEST_WAIT, Payoff
from verl_tlt.trainer.runtime_control import RuntimeControl

REPLICAS = ["a", "b"]


def rollout(accepted=0.8, drafting=REPLICAS, busy_s=10.0):
    """Statistics of a rollout in which these replicas drafted two tokens in each of their steps."""
    return {
        name: EngineStats(
            num_drafts=1000, num_accepted_tokens_per_pos=(round(1000 * accepted), round(600 * accepted)),
            steps_by_draft_length={2: 90, 0: 10}, busy_s=busy_s,
        ) if name in drafting
        else EngineStats(steps_by_draft_length={OFF: 100}, busy_s=busy_s)
        for name in REPLICAS
    }  # fmt: skip


def saved(share, drafting=REPLICAS, busy_s=10.0):
    """Savings of such a rollout, the same share of the seconds against stock and against OFF."""
    off_s = busy_s / (1 - share)
    return Savings(-busy_s, share * busy_s, {n: (off_s - busy_s if n in drafting else 0.0, busy_s) for n in REPLICAS})


def observe(payoff, share, accepted=0.8, drafting=REPLICAS, stock=1.0, audited=False):
    return payoff.observe(rollout(accepted, drafting), saved(share, drafting), stock, audited)


def stopped():
    payoff = Payoff(REPLICAS)
    said = [observe(payoff, -0.2) for _ in range(IN_A_ROW)]
    return payoff, said


def test_rollouts_that_end_later_than_stocks_stop_it_with_the_cause():
    payoff, said = stopped()
    assert said[:-1] == [None, None] and "accept length of 2.28 does not make up" in said[-1]
    assert payoff.cause and payoff.choose_probe() is None


@pytest.mark.parametrize(
    ("shares", "stops"),
    [([-0.2, -0.2, 0.1, -0.2, -0.2], False), ([-0.02] * 9, False), ([0.3] * 9, False), ([-0.2, -0.05, -0.04], True)],
)
def test_only_a_stretch_of_them_does(shares, stops):
    payoff = Payoff(REPLICAS)
    for share in shares:
        observe(payoff, share)
    assert bool(payoff.cause) == stops


def test_a_drafter_of_which_nothing_is_accepted_is_named_even_where_nothing_can_be_compared():
    payoff = Payoff(REPLICAS)
    said = [payoff.observe(rollout(accepted=0.02), Savings(), 1.0, False) for _ in range(IN_A_ROW)]
    assert "a drafter of another policy" in said[-1] and "accept length 1.03" in said[-1]
    ngrams = Payoff(REPLICAS, source="ngram")
    assert [ngrams.observe(rollout(accepted=0.02), Savings(), 1.0, False) for _ in range(9)] == [None] * 9


def test_an_engine_that_is_slower_than_stock_without_any_draft_is_named():
    payoff = Payoff(REPLICAS)
    for _ in range(IN_A_ROW):
        gains = Savings(-1.0, -1.0, saved(0.05).of)  # against OFF drafting gains, against stock it loses
        said = payoff.observe(rollout(), gains, 0.8, False)
    assert "takes 1.25 times stock vLLM's step" in said and "tlt.speculation.enable=false" in said


def test_an_order_is_followed_and_audits_and_rollouts_without_drafts_say_nothing():
    ordered, audited, resting = Payoff(REPLICAS, policy="fixed"), Payoff(REPLICAS), Payoff(REPLICAS)
    for _ in range(9):
        assert observe(ordered, -0.5) is None
        assert observe(audited, -0.5, audited=True) is None
        assert observe(resting, -0.5, drafting=[]) is None
    assert not ordered.cause and not audited.cause and not resting.cause


def test_it_goes_on_when_a_probe_gains_and_waits_longer_when_it_does_not():
    payoff, _ = stopped()
    waits, probes = [], []
    for _ in range(5):
        waits.append(0)
        while (probe := payoff.choose_probe()) is None:
            assert observe(payoff, 0.0, drafting=[]) is None
            waits[-1] += 1
        probes.append(probe)
        assert observe(payoff, -0.1, drafting=[probe]) is None
    assert waits == [FIRST_PROBE, 16, 32, LONGEST_WAIT, LONGEST_WAIT] and probes == ["a", "b", "a", "b", "a"]
    while payoff.choose_probe() is None:
        observe(payoff, 0.0, drafting=[])
    assert "b drafted, and saved 20%" in observe(payoff, 0.2, drafting=["b"])
    assert not payoff.cause and payoff.choose_probe() is None


@pytest.mark.parametrize(("share", "accepted", "drafting"), [(0.01, 0.8, ["a"]), (0.2, 0.0, ["a"]), (0.2, 0.8, [])])
def test_what_is_no_evidence_does_not_turn_it_on(share, accepted, drafting):
    """A gain within the noise; one without anything accepted; a probe whose engine did not draft."""
    payoff, _ = stopped()
    while payoff.choose_probe() is None:
        observe(payoff, 0.0, drafting=[])
    assert observe(payoff, share, accepted, drafting) is None and payoff.cause


@pytest.mark.parametrize(("compared_s", "goes_on"), [(0.0, False), (4.9, False), (5.0, True)])
def test_a_probe_of_which_little_can_be_compared_is_no_evidence(compared_s, goes_on):
    payoff, _ = stopped()
    while payoff.choose_probe() is None:
        observe(payoff, 0.0, drafting=[])
    gains = Savings(None, None, {"a": (compared_s, compared_s)})  # twice as fast, where it could be told
    said = payoff.observe(rollout(drafting=["a"], busy_s=10.0), gains, 1.0, False)
    assert (said is not None) == goes_on == (not payoff.cause)


def test_the_trainer_rests_every_replica_but_the_probe(tmp_path, caplog, monkeypatch):
    """Live: rollouts that decode at half of stock's speed, then a probe that decodes at twice the speed."""
    monkeypatch.setattr(logging.getLogger("verl_tlt"), "propagate", True)  # a trainer's set-up turns it off
    caplog.set_level(logging.INFO, logger="verl_tlt")  # libraries change the levels of the root's handlers
    live = RuntimeControl(str(tmp_path), REPLICAS, control_every=0)
    live.calibrated(Calibration({OFF: [(1, 0.01), (8, 0.01)]}))

    def decode(step, seconds, drafting):
        stats = {}
        for name, s in rollout(drafting=drafting).items():
            spent = seconds if name in drafting else 0.01 * 100
            stretch = LoadInterval(step, step + spent, 4.0, 0.0, spent, 100.0, name not in drafting)
            stats[name] = EngineStats(**{**vars(s), "busy_s": spent, "load_intervals": (stretch,)})
        live.account(stats)

    with caplog.at_level(logging.WARNING):
        for step in range(IN_A_ROW):
            assert live.drafting_disabled(step) == []
            decode(10.0 * step, 2.0, REPLICAS)
        assert live.payoff.cause and caplog.text.count("Speculation is stopped") == 1
        for step in range(3, 3 + FIRST_PROBE):
            assert live.drafting_disabled(step) == REPLICAS
            decode(10.0 * step, 1.0, [])
        assert live.drafting_disabled(20) == ["b"]
        decode(200.0, 0.5, ["a"])
    assert "Speculation goes on: a drafted" in caplog.text
    assert live.drafting_disabled(21) == []
