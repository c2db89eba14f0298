"""What the RL trainer keeps for a spot trainer that cannot take it yet; in Ray's place is an actor made here."""

from types import SimpleNamespace

from verl_tlt.messages.training import CapturedStates, SpotPlan
from verl_tlt.trainer import spot as module
from verl_tlt.trainer.spot import SpotTrainerHandle


def test_verifier_weights_wait_for_a_spot_trainer_that_starts(monkeypatch):
    """They come once after a weight sync, and another process would load those that the run began with."""
    sent = []
    spot = SpotTrainerHandle(SpotPlan.__new__(SpotPlan))
    spot.off = ""
    spot._actor = SimpleNamespace(add=SimpleNamespace(remote=lambda *arguments: sent.append(arguments)))
    monkeypatch.setattr(module, "arrived", lambda *_: True)
    for step, up, weights in ((1, False, "old"), (2, False, "new"), (3, True, None), (4, True, None)):
        monkeypatch.setattr(spot, "started", lambda up=up: up)
        spot.add(step, [CapturedStates(None, weights, 0.0, 0)])
    assert [(step, weights) for step, _, weights, _ in sent] == [(3, "new"), (4, None)]
