"""What each verdict of the gate has the workers do, and what engines serve after it."""

from types import SimpleNamespace

import numpy as np
import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.messages.training import DrafterProvenance, HeldOutScores
from verl_tlt.trainer.drafter_update import DrafterUpdates
from verl_tlt.trainer.step_log import StepLog


class Workers:
    """Records what they are asked; they have nothing to merge."""

    def __init__(self):
        self.asked = []

    def workers(self):
        return []

    def revert(self, which):
        self.asked.append(which)

    def export(self, version, dtype, acceptance):
        self.asked.append((version, acceptance))
        return SimpleNamespace(version=version, weights=b"")

    def stage(self, drafter):
        """They hand it to the engines."""

    def keep_as_served(self):
        """They mark it."""


def scores(candidate, served, initial, sequences=40):
    """Of drafters with these chances to be accepted, 50 drafts of one token in each sequence of its own prompt."""
    each = [np.tile([50.0, 50.0 * chance], (sequences, 1)) for chance in (candidate, served, initial)]
    return HeldOutScores(np.arange(sequences), np.full(sequences, 100), *each)


@pytest.mark.parametrize(
    ("chances", "gate", "decision", "asked"),
    [
        ((0.6, 0.5, 0.1), True, "published", [(3, [0.6])]),
        ((0.5, 0.6, 0.1), True, "reverted", ["served"]),
        ((0.5, 0.4, 0.6), True, "reverted", ["initial", (3, [0.6])]),
        ((0.5, 0.4, 0.508), True, "kept", []),
        ((0.5, 0.6, 0.1), False, "published", [(3, [0.5])]),
    ],
    ids=["publish", "revert to served", "revert to initial", "hold", "gate off"],
)
def test_a_verdict_is_carried_out(chances, gate, decision, asked):
    workers, session = Workers(), SimpleNamespace(scores=scores(*chances), steps=0, replica="a")
    config = TLTConfig.from_dict({"gate": {"enable": gate}})
    served = DrafterProvenance("policy", "data", "hass", 1.0, version=2)
    update = DrafterUpdates(workers, config, served, "float32", StepLog(None)).update([session])
    assert (update.decision, workers.asked) == (decision, asked)
    assert (update.drafter is not None) == any(isinstance(one, tuple) for one in asked)


@pytest.mark.parametrize(("gate", "version", "acceptance"), [(False, 3, ()), (True, 2, (0.0,))])
@pytest.mark.parametrize("sequences", [0, 1])
def test_of_a_drafter_that_nobody_scored_the_acceptance_is_unknown(log, gate, version, acceptance, sequences):
    """What was held out, if anything, is too short to judge; the drafter before this one was never accepted."""
    unscored = HeldOutScores(np.arange(sequences), np.zeros(sequences, int), *[np.zeros((sequences, 2))] * 3)
    served = DrafterProvenance("policy", "data", "hass", 1.0, version=2, acceptance=(0.0,))
    updates = DrafterUpdates(Workers(), TLTConfig.from_dict({"gate": {"enable": gate}}), served, "float32", log)
    updates.begin([SimpleNamespace(scores=unscored, steps=0, replica="a")])
    assert updates.publish(5, within_s=60.0).tau == {}
    assert (updates.served.version, updates.served.acceptance) == (version, acceptance)
