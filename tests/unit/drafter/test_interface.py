"""The interface of `verl_tlt.drafter`: its example runs, its names are explained, its errors name the cause."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from tiny_policy import make_policy

import verl_tlt
from verl_tlt.drafter import (
    DrafterError,
    DrafterTrainer,
    PolicyStates,
    Text,
    TrainingSequence,
    VerifierWeights,
    acceptance,
    batches,
    check_drafter,
    load_drafter,
    pack,
    policy_shape,
)

EXAMPLE = Path(verl_tlt.__file__).parents[1] / "examples" / "train_drafter.py"


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert len(re.findall(r"epoch \d: loss [\d.]+ over \d+ tokens", said)) == 3
    assert re.search(r"accept length at K=3: [1-4]\.\d\d\ndrafter$", said.strip())
    check_drafter(tmp_path / "drafter", str(tmp_path / "tiny-policy"))


def sequence(tokens, prompt_len=2, aux=96):
    length = len(tokens)
    return TrainingSequence(torch.tensor(tokens), prompt_len, torch.zeros(length, aux), torch.zeros(length, 32))


def step(drafter, *sequences):
    return DrafterTrainer(drafter).step(pack(sequences))


def captured(policy, *texts):
    return PolicyStates(policy, (1, 2, 3))([Text(*text) for text in texts])


MISTAKES = {
    "prompt_len=4 must be 0..3": lambda policy, drafter: sequence([1, 2, 3], 4),
    "3 tokens came with 2 aux": lambda *_: TrainingSequence(torch.arange(3), 0, torch.zeros(2, 96), torch.zeros(3, 32)),
    "prompt_len=3 must be 0..2": lambda policy, drafter: captured(policy, ((1, 2), 3)),
    "A text without tokens": lambda policy, drafter: captured(policy, ((1, 2), 1), ((), 0)),
    "budget=0 must be": lambda policy, drafter: list(batches([sequence([1, 2, 3])], 0)),
    "64 wide, and the drafter reads 96": lambda policy, drafter: acceptance(drafter, [sequence([1, 2, 3, 4], aux=64)]),
    "Token 48 is outside": lambda policy, drafter: captured(policy, ((1, 48), 1)),
    "Token -1 is outside": lambda policy, drafter: step(drafter, sequence([1, -1, 3, 4])),
    "Token 99 is outside": lambda policy, drafter: acceptance(drafter, [sequence([1, 2, 99, 3])]),
    "No row of this batch has a loss": lambda policy, drafter: step(drafter, sequence([1, 2, 3], 3)),
    "no sequence to pack": lambda policy, drafter: pack([]),
    "at least 2": lambda policy, drafter: pack([sequence([1], 1)]),
    "is read from a folder, a name on the hub": lambda policy, drafter: policy_shape(policy),
    "not from a Qwen3": lambda policy, drafter: VerifierWeights.from_policy_dir(policy),
    "not as a Drafter": lambda policy, drafter: load_drafter(drafter, policy.config),
}
"""What each message says, and the mistake that it names."""


@pytest.mark.parametrize("said", MISTAKES)
def test_what_a_caller_did_wrong_is_a_drafter_error(said, drafter):
    with pytest.raises(DrafterError) as error:
        MISTAKES[said](make_policy(), drafter)
    assert said in str(error.value) and "\n" not in str(error.value)
