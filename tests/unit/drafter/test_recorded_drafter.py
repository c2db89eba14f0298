"""A drafter that an earlier version saved still loads: the same weights, logits and optimizer.

`recorded/` holds a drafter with a pruned vocabulary as `save_drafter` of 0.1.0 wrote it after three training steps, the
config of its policy, and what it computed then: `expected.safetensors`.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from vllm_by_hand import passes

from verl_tlt.drafter import (
    DrafterTrainer,
    TrainingSequence,
    VerifierWeights,
    align,
    fingerprint,
    load_drafter,
    load_training_state,
    pack,
    refresh_verifier_weights,
    serving_tensors,
)

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def expected():
    with safe_open(RECORDED / "expected.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture
def loaded(expected):
    tensors, _ = expected
    model = load_drafter(RECORDED / "drafter", json.loads((RECORDED / "policy_config.json").read_text()))
    refresh_verifier_weights(model, VerifierWeights(tensors["embed"], tensors["lm_head"], tensors["norm"]))
    return model


def sequence_of(expected):
    tensors, facts = expected
    return TrainingSequence(tensors["tokens"], int(facts["prompt_len"]), tensors["aux"], tensors["last"])


def test_the_recorded_drafter_has_its_weights_and_logits(loaded, expected):
    tensors, facts = expected
    maps = ("d2t",)  # which 0.1.0 left out of the fingerprint
    assert fingerprint(serving_tensors(loaded, without=maps)) == facts["fingerprint"]
    assert fingerprint(serving_tensors(loaded, torch.bfloat16, without=maps)) == facts["fingerprint_bfloat16"]
    for k, (logits, _) in enumerate(passes(loaded, align(sequence_of(expected)))):
        torch.testing.assert_close(logits, tensors[f"logits.{k}"], rtol=1e-4, atol=1e-5)


def test_training_goes_on_from_the_recorded_state(loaded, expected):
    trainer = DrafterTrainer(loaded, warmup_steps=2)
    trainer.load_state(load_training_state(RECORDED / "drafter"))
    assert trainer.steps == 3
    moments = trainer.optimizer.state[trainer.parameters["fc.weight"]]
    assert moments["step"] == 3 and bool(moments["exp_avg_sq"].any())
    assert not trainer.step(pack([sequence_of(expected)])).skipped
