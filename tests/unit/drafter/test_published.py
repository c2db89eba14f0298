"""Policies as they were published: what the doctor accepts is built, filled and trained, the rest is a sentence."""

import json
from copy import deepcopy

import pytest
import torch
import transformers
from published import PUBLISHED
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from verl_tlt.checks.models import check_policy
from verl_tlt.drafter.build import build_drafter
from verl_tlt.drafter.capture import PolicyStates, Text, load_policy
from verl_tlt.drafter.check import check_drafter
from verl_tlt.drafter.checkpoint import save_drafter
from verl_tlt.drafter.data import pack
from verl_tlt.drafter.policy import SUPPORTED, aux_layers_for
from verl_tlt.drafter.tensor_file import WEIGHTS
from verl_tlt.drafter.train import DrafterTrainer
from verl_tlt.drafter.verifier import VerifierWeights, check_policy_files, refresh_verifier_weights
from verl_tlt.errors import DrafterError


def published(path, name):
    """A small policy's folder with its config as published."""
    fields = PUBLISHED[name]
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText if "vision_config" in fields else transformers.AutoModelForCausalLM
    model = kind.from_config(CONFIG_MAPPING[fields["model_type"]](**deepcopy(fields)), dtype=torch.float32)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_every_family_that_is_claimed_is_here():
    kinds = {fields["model_type"] for fields in PUBLISHED.values()}
    assert kinds | {"qwen3_5_text"} == set(SUPPORTED), (
        "the text model of Qwen3.5 is published inside the whole one only"
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_doctor_accepts_is_built_filled_and_trained(tmp_path, name):
    path = published(tmp_path / "policy", name)
    found = check_policy(str(path))
    assert found.level == "ok" and "not here" not in found.sentence, found
    drafter = build_drafter(path)
    refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(path))
    states = PolicyStates(load_policy(path, "cpu"), aux_layers_for(4))
    sequences = states([Text(torch.arange(3, 40), 5)])
    result = DrafterTrainer(drafter, ttt_steps=2).step(pack(sequences))
    assert torch.isfinite(torch.tensor(result.loss))
    check_drafter(save_drafter(drafter, tmp_path / "drafter", {}, policy=path), path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Qwen3-8B", {"vocab_size": 300}, "the policy's config asks for [300, 64]"),
        ("Phi-4-mini", {"rope_scaling": {"type": "longrope", "short_factor": 3, "long_factor": None}}, "of a phi3"),
        ("Qwen3-8B", {"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple of num_key_value_heads=2"),
        ("Qwen3-8B", {"num_hidden_layers": 2}, "needs at least 3"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(tmp_path, name, change, said):
    path = published(tmp_path / "policy", name)
    (path / "config.json").write_text(json.dumps({**PUBLISHED[name], **change}))
    found = check_policy(str(path))
    assert found.level == "refuse" and "\n" not in found.sentence and found.sentence.endswith("."), found
    assert said in found.sentence, found
    with pytest.raises(DrafterError):
        check_policy_files(path)


def quantized(policy, file, **fields):
    (policy / file).write_text(json.dumps((PUBLISHED["Qwen3-8B"] if file == "config.json" else {}) | fields))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda policy: (policy / WEIGHTS).rename(policy / "pytorch_model.bin"), "pytorch_model.bin is pickled"),
        (lambda policy: quantized(policy, "config.json", quantization_config={"quant_method": "awq"}), "(awq)"),
        (lambda policy: quantized(policy, "config.json", compression_config={"quant_method": "sparse"}), "(sparse)"),
        (
            lambda policy: quantized(policy, "hf_quant_config.json", quantization={"quant_algo": "FP8"}),
            "hf_quant_config.json: quantization (FP8)",
        ),
    ],
)
def test_weights_that_cannot_be_read_are_refused_before_a_run(tmp_path, spoil, said):
    path = published(tmp_path / "policy", "Qwen3-8B")
    spoil(path)
    found = check_policy(str(path))
    assert found.level == "refuse" and said in found.sentence


@pytest.mark.parametrize("other", [True, False])
def test_a_tied_policy_whose_files_have_another_head_has_the_files(tmp_path, other):
    """As transformers loads it."""
    path = published(tmp_path / "policy", "Llama-3.2-1B")
    tensors = load_file(path / WEIGHTS)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + 1 if other else embedding.clone()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    weights, loaded = VerifierWeights.from_policy_dir(path), transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(weights.lm_head, loaded.lm_head.weight)
    assert (weights.lm_head is weights.embed) != other
