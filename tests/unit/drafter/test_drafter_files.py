"""A drafter's files as others write them: loaded if vLLM loads them, or one sentence."""

import json

import pytest
import torch
from drafter_folders import INDEX, WEIGHTS, refusal, run_start, set_tensors, sharded, written
from mtp_policy import make_mtp_policy
from safetensors.torch import load_file

from verl_tlt.checks.models import check_recipe_drafter
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    VerifierWeights,
    load_drafter,
    save_drafter,
    serving_tensors,
    write_back,
)
from verl_tlt.drafter.check import tokenizer_facts
from verl_tlt.drafter.tensor_file import tensor_files


@pytest.fixture
def saved(drafter, tmp_path):
    return save_drafter(drafter, tmp_path / "saved", {})


def test_a_head_in_several_files_is_one_in_one_file(policy_dir, saved, tmp_path):
    for path in (saved, written(tmp_path / "theirs")):
        whole = serving_tensors(load_drafter(path, policy_dir))
        parts = serving_tensors(load_drafter(sharded(path), policy_dir))
        assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
        settings = TLTConfig.from_dict({"drafter": {"path": str(path)}})
        assert check_recipe_drafter(settings, str(policy_dir), 64).level == "ok"
        run_start(path, policy_dir)


def test_no_way_in_loads_numbers_that_are_not_finite(saved, policy_dir):
    set_tensors(saved, {"fc.weight": torch.full((32, 96), torch.nan)})
    for way in (load_drafter, run_start):
        with pytest.raises(DrafterError, match=r"fc\.weight holds NaN or infinity"):
            way(saved, policy_dir)


def test_a_head_that_is_no_good_is_not_written_back(tmp_path):
    policy, head = tmp_path / "policy", tmp_path / "head"
    make_mtp_policy(policy, "mimo")
    make_mtp_policy(head, "mimo")
    name = "model.mtp_layers.0.input_proj.weight"
    set_tensors(head, {name: load_file(head / WEIGHTS)[name] / 0})
    before = {file.name: file.read_bytes() for file in policy.iterdir()}
    with pytest.raises(DrafterError, match="holds NaN or infinity"):
        write_back(head, policy)
    assert {file.name: file.read_bytes() for file in policy.iterdir()} == before


@pytest.mark.parametrize("table", [{}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_kind_is_a_sentence(saved, policy_dir, table):
    (sharded(saved) / INDEX).write_text(json.dumps(table))
    assert INDEX in refusal(saved, policy_dir)
    (saved / "config.json").write_text((policy_dir / "config.json").read_text())
    for read in (tensor_files, VerifierWeights.from_policy_dir):
        with pytest.raises(DrafterError, match=INDEX):
            read(saved)


@pytest.mark.parametrize("content", [{"model": 3}, {"added_tokens": [1]}])
def test_a_tokenizer_of_another_kind_is_a_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DrafterError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_facts(tmp_path)


def test_a_single_file_comes_before_a_stale_index(policy, tmp_path):
    path = tmp_path / "policy"
    policy.save_pretrained(path)
    (path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    assert torch.equal(VerifierWeights.from_policy_dir(path).lm_head, policy.lm_head.weight)
