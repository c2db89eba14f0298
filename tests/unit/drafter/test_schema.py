"""Files that somebody else made: what vLLM would read of them is within bounds, refused in a sentence, or dropped."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import VOCAB, drafter_of

from verl_tlt.checks.models import check_recipe_drafter
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    check_drafter,
    fingerprint,
    load_drafter,
    provenance,
    save_drafter,
    to_drafter_file,
)
from verl_tlt.trainer.run_setup import first_drafter

KEPT = torch.tensor([1, 4, 30, 47])
"""Tokens of the pruned draft vocabulary."""
LAYER = "transformer_layer_config."


@pytest.fixture
def whole(drafter, tmp_path):
    return save_drafter(drafter, tmp_path / "whole", {})


@pytest.fixture
def pruned(policy, tmp_path):
    return save_drafter(drafter_of(policy, draft_ids=KEPT), tmp_path / "pruned", {})


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def write(directory, key, value):
    """Set a dotted key of config.json."""
    config = at = config_of(directory)
    *path, last = key.split(".")
    for part in path:
        at = at[part]
    at[last] = value
    (directory / "config.json").write_text(json.dumps(config))


def refusal(directory, policy_dir):
    """The sentence of check, load and doctor alike."""
    with pytest.raises(DrafterError) as caught:
        check_drafter(directory, policy_dir, 200)
    with pytest.raises(DrafterError) as again:
        load_drafter(directory, policy_dir, min_context=200)
    sentence = str(caught.value)
    found = check_recipe_drafter(TLTConfig.from_dict({"drafter": {"path": str(directory)}}), str(policy_dir), 190)
    assert (found.level, found.sentence) == ("refuse", f"tlt.drafter.path: {sentence}") and str(again.value) == sentence
    assert str(directory) in sentence and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 500
    return sentence


ROPES, ROPE = f"{LAYER}rope_parameters", {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        (f"{LAYER}quantization_config", {"quant_method": "fp8"}),
        (f"{LAYER}model_type", "qwen3"),
        (f"{LAYER}layer_types", ["sliding_attention"]),
        (f"{LAYER}hidden_act", "gelu"),
        (f"{LAYER}mlp_bias", True),
        (f"{LAYER}rms_norm_eps", float("nan")),
        (f"{LAYER}rms_norm_eps", 1e300),
        (f"{LAYER}rms_norm_eps", -1e-6),
        (f"{LAYER}rms_norm_eps", "1e-6"),
        (f"{LAYER}head_dim", 15),
        (f"{LAYER}num_key_value_heads", 0),
        (f"{LAYER}intermediate_size", 10**30),
        (f"{LAYER}max_position_embeddings", True),
        (ROPES, [1]),
        (ROPES, ROPE | {"rope_type": "fope"}),
        (ROPES, ROPE | {"rope_theta": float("inf")}),
        (ROPES, ROPE | {"rope_theta": "1e4"}),
        (ROPES, ROPE | {"partial_rotary_factor": 0.5}),
        (ROPES, ROPE | {"rope_type": "llama3", "factor": 8.0}),
        (ROPES, ROPE | {"rope_type": "linear", "factor": 1e5}),
        (ROPES, ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**9}),
        (ROPES, ROPE | LONGROPE | {"original_max_position_embeddings": 64}),
        ("eagle_aux_hidden_state_layer_ids", [1, "2", 3]),
        ("draft_vocab_size", 2.5),
        ("target_hidden_size", 64),
        ("norm_output", "yes"),
    ],
)
def test_what_vllm_could_not_serve_is_refused_by_its_key(whole, policy_dir, key, value):
    write(whole, key, value)
    sentence = refusal(whole, policy_dir)
    assert key in sentence or "of type 'llama3' need low_freq_factor" in sentence


def test_a_field_that_nobody_needs_is_dropped_before_staging(whole, policy_dir, drafter):
    before = to_drafter_file(load_drafter(whole, policy_dir), "float32")
    for key, value in {
        "auto_map": {"AutoConfig": "elsewhere.Config"},
        "dtype": "float8",
        "num_aux_hidden_states": 7,
        "eagle_config": {"use_aux_hidden_state": False},
        "logit_scale": float("nan"),
        "speculators_config.verifier.name_or_path": "/another/model",
        "speculators_config.proposal_methods": [],
        f"{LAYER}auto_map": {"AutoConfig": "elsewhere.Config"},
        f"{LAYER}torch_dtype": "float8",
        f"{LAYER}sliding_window": 3,
        f"{LAYER}is_causal": False,
        f"{LAYER}bias": True,
        f"{LAYER}layer_types": ["full_attention"] * 3,
        f"{LAYER}_attn_implementation": "elsewhere",
    }.items():
        write(whole, key, value)
    assert to_drafter_file(load_drafter(whole, policy_dir), "float32") == before
    assert "elsewhere" not in before[0] and "/another/model" not in before[0]


def test_a_table_of_positions_is_as_long_as_the_engine_needs(whole, policy, policy_dir):
    write(whole, f"{LAYER}max_position_embeddings", 3_000_000_000)  # 192 GB of RoPE table
    served = load_drafter(whole, policy_dir, min_context=200).config.transformer_layer_config
    assert served.max_position_embeddings == policy.config.max_position_embeddings + 16
    write(whole, ROPES, ROPE | {"rope_type": "dynamic", "factor": 2.0})
    assert "positions" in refusal(whole, policy_dir)


def test_deep_json_is_one_sentence(whole, policy_dir):
    for depth in (50, 100_000):
        (whole / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
        assert "config.json is not readable JSON: it is nested deeper" in refusal(whole, policy_dir)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({0: -2}, "d2t[0]=-2 makes draft id 0 stand for token -2; tokens must ascend within 0..47"),
        ({3: 45}, "d2t[3]=45 makes draft id 3 stand for token 48; tokens must ascend within 0..47"),
        ({2: 2**62}, "ascend within 0..47"),
        ({1: 0}, "d2t[1]=0 makes draft id 1 stand for token 1; tokens must ascend"),  # not injective
        ({2: 29}, "t2d does not mark the 4 tokens"),
    ],
)
def test_maps_stay_within_the_vocabulary_and_agree(pruned, policy_dir, offsets, said):
    check_drafter(pruned, policy_dir)
    tensors = load_file(pruned / "model.safetensors")
    for i, value in offsets.items():
        tensors["d2t"][i] = value
    save_file(tensors, pruned / "model.safetensors")
    assert said in refusal(pruned, policy_dir)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("fc.weight", torch.zeros(32, 96, dtype=torch.float8_e4m3fn), "fc.weight holds F8_E4M3"),
        ("d2t", torch.zeros(4), "d2t holds F32"),
        ("layers.0.self_attn.q_norm.weight", torch.zeros(16), "q_norm.weight, which the network"),
        ("mask_hidden", torch.zeros(1, 96), "mask_hidden, which the network"),
        ("embed_tokens.weight", torch.zeros(10, 32), "embed_tokens.weight is [10, 32], but config.json asks for [48"),
        ("embed_tokens.weight", torch.zeros(48, 32, dtype=torch.int64), "embed_tokens.weight holds I64"),
    ],
)
def test_tensors_are_those_of_the_network(pruned, policy_dir, name, tensor, said):
    save_file(load_file(pruned / "model.safetensors") | {name: tensor}, pruned / "model.safetensors")
    assert said in refusal(pruned, policy_dir)


def test_the_maps_are_in_the_fingerprint(pruned):
    """By vLLM's name as well, whose parameter is all zeros where the vocabulary is whole."""
    tensors = load_file(pruned / "model.safetensors")
    moved = {**tensors, "d2t": tensors["d2t"] + torch.tensor([0, 0, 0, -1])}
    assert fingerprint(moved) != fingerprint(tensors)
    live = {"model.fc.weight": tensors["fc.weight"], "draft_id_to_target_id": tensors["d2t"]}
    assert fingerprint(live) == fingerprint({name: tensors[name] for name in ("fc.weight", "d2t")})
    none = {"fc.weight": tensors["fc.weight"]}
    zeros = torch.zeros(VOCAB, dtype=torch.int64)
    assert fingerprint(none) == fingerprint(none | {"draft_id_to_target_id": zeros}) != fingerprint(live)


@pytest.mark.parametrize("rates", [[0.5, "0.4"], [0.5, float("nan")], [1.5], "0.5", {"0": 0.5}, [0.1] * 17, 0.5])
def test_an_acceptance_that_is_none_is_left_out(whole, policy_dir, rates):
    (whole / "provenance.json").write_text(json.dumps({"acceptance": rates, "policy": "a"}))
    assert provenance(whole) == {"policy": "a"}
    settings = TLTConfig.from_dict({"drafter": {"path": str(whole)}})
    assert first_drafter(settings, str(policy_dir), "float32", 64, None).served.acceptance == ()
