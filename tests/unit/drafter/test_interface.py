"""The interface of `verl_tlt.drafter`: its example runs, its names are explained, its errors name the cause."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_policy import make_policy

import verl_tlt
from verl_tlt import drafter
from verl_tlt.drafter import (
    DrafterError,
    DrafterTrainer,
    PolicyStates,
    Text,
    TrainingSequence,
    VerifierWeights,
    acceptance,
    batches,
    build_drafter,
    check_drafter,
    load_drafter,
    pack,
    policy_shape,
    train_until,
)

EXAMPLE = Path(verl_tlt.__file__).parents[1] / "examples" / "train_drafter.py"


def test_the_example_runs_as_it_stands(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"epoch \d: loss [\d.]+ over \d+ tokens", done.stdout)) == 3
    assert re.search(r"accept length at K=3: [1-4]\.\d\d\ndrafter$", done.stdout.strip())
    check_drafter(tmp_path / "drafter", str(tmp_path / "policy"))


@pytest.mark.parametrize("name", drafter.__all__)
def test_every_public_name_is_explained(name):
    assert getattr(drafter, name).__doc__


def sequence(tokens, prompt_len=2):
    return TrainingSequence(
        torch.tensor(tokens), prompt_len, torch.zeros(len(tokens), 96), torch.zeros(len(tokens), 32)
    )


MISTAKES = {
    "an unknown loss": (lambda policy, drafter: DrafterTrainer(drafter, loss="kl"), "loss='kl' is no loss"),
    "a loss of nothing": (lambda policy, drafter: DrafterTrainer(drafter, loss="{}"), "loss='{}' is no loss"),
    "a longer prompt than text": (lambda policy, drafter: sequence([1, 2, 3], 4), "prompt_len=4 must be 0..3"),
    "states of another length": (
        lambda policy, drafter: TrainingSequence(torch.arange(3), 0, torch.zeros(2, 96), torch.zeros(3, 32)),
        "3 tokens came with 2 aux",
    ),
    "a longer prompt than text, captured": (
        lambda policy, drafter: PolicyStates(policy, (1, 2, 3))([Text((1, 2), 3)]), "prompt_len=3 must be 0..2",
    ),
    "no tokens, captured": (
        lambda policy, drafter: PolicyStates(policy, (1, 2, 3))([Text((1, 2), 1), Text((), 0)]), "without tokens",
    ),
    "no rows in a batch": (lambda policy, drafter: list(batches([sequence([1, 2, 3])], 0)), "budget=0 must be"),
    "states of two layers": (
        lambda policy, drafter: acceptance(
            drafter, [TrainingSequence(torch.arange(4), 1, torch.zeros(4, 64), torch.zeros(4, 32))]),
        "64 wide, and the drafter reads 96",
    ),
    "a token of none, captured": (
        lambda policy, drafter: PolicyStates(policy, (1, 2, 3))([Text((1, 48), 1)]), "Token 48 is outside",
    ),
    "a token of none, trained": (
        lambda policy, drafter: DrafterTrainer(drafter).step(pack([sequence([1, 2, 48, 3, 4])])), "vocabulary, 0..47",
    ),
    "a token of none, streamed": (
        lambda policy, drafter: train_until(
            DrafterTrainer(drafter), batches([sequence([1, -1, 3, 4])], 64), lambda: False),
        "Token -1 is outside",
    ),
    "a token of none, scored": (
        lambda policy, drafter: acceptance(drafter, [sequence([1, 2, 99, 3])]), "Token 99 is outside",
    ),
    "no response": (lambda policy, drafter: DrafterTrainer(drafter).step(pack([sequence([1, 2, 3], 3)])), "has a loss"),
    "nothing to pack": (lambda policy, drafter: pack([]), "no sequence to pack"),
    "a token alone": (lambda policy, drafter: pack([sequence([1], 1)]), "at least 2"),
    "a model for its shape": (lambda policy, drafter: policy_shape(policy), "not from a Qwen3ForCausalLM"),
    "a model for its policy": (lambda policy, drafter: build_drafter(policy), "not from a Qwen3ForCausalLM"),
    "a model for its folder": (lambda policy, drafter: VerifierWeights.from_policy_dir(policy), "not from a Qwen3"),
    "a model for a drafter": (lambda policy, drafter: load_drafter(drafter, policy.config), "not as a Drafter"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_caller_did_wrong_is_a_drafter_error(mistake, drafter):
    wrong, said = MISTAKES[mistake]
    with pytest.raises(DrafterError) as error:
        wrong(make_policy(), drafter)
    assert said in str(error.value) and "\n" not in str(error.value)
