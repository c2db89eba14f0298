"""Files that somebody else made: what vLLM would read of them is within bounds, refused in a sentence, or dropped."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from drafter_folders import refusal, run_start, set_field, set_tensors, written
from safetensors.torch import load_file
from tiny_policy import drafter_of, make_policy

from verl_tlt.drafter import check_drafter, load_drafter, provenance, save_drafter, to_drafter_file

LAYER, IDS = "transformer_layer_config.", "eagle_aux_hidden_state_layer_ids"
ROPES, ROPE = f"{LAYER}rope_parameters", {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}


@pytest.fixture
def whole(drafter, tmp_path):
    return save_drafter(drafter, tmp_path / "whole", {})


@pytest.fixture
def pruned(policy, tmp_path):
    return save_drafter(drafter_of(policy, draft_ids=torch.tensor([1, 4, 30, 47])), tmp_path / "pruned", {})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("quantization_config", {"quant_method": "fp8"}, None),
        (f"{LAYER}quantization_config", {"quant_method": "fp8"}, None),
        (f"{LAYER}model_type", "qwen3", None),
        (f"{LAYER}layer_types", ["sliding_attention"], None),
        (f"{LAYER}hidden_act", "gelu", None),
        (f"{LAYER}mlp_bias", True, None),
        (f"{LAYER}num_hidden_layers", 2, "num_hidden_layers must be 1"),
        (f"{LAYER}num_attention_heads", None, "num_attention_heads must be a valid integer"),
        (f"{LAYER}rms_norm_eps", float("nan"), None),
        (f"{LAYER}rms_norm_eps", 1e300, None),
        (f"{LAYER}rms_norm_eps", -1e-6, None),
        (f"{LAYER}rms_norm_eps", "1e-6", None),
        (f"{LAYER}head_dim", 15, None),
        (f"{LAYER}num_key_value_heads", 0, None),
        (f"{LAYER}num_key_value_heads", 1, "k_proj.weight is [32, 64], but config.json asks for [16, 64]"),
        (f"{LAYER}intermediate_size", 10**30, None),
        (f"{LAYER}max_position_embeddings", True, None),
        (f"{LAYER}max_position_embeddings", None, "max_position_embeddings must be a valid integer, not None"),
        (ROPES, [1], None),
        (ROPES, ROPE | {"rope_type": "fope"}, None),
        (ROPES, ROPE | {"rope_theta": float("inf")}, None),
        (ROPES, ROPE | {"rope_theta": "1e4"}, None),
        (ROPES, ROPE | {"partial_rotary_factor": 0.5}, None),
        (ROPES, ROPE | {"rope_type": "llama3", "factor": 8.0}, "of type 'llama3' need low_freq_factor"),
        (ROPES, ROPE | {"rope_type": "linear", "factor": 1e5}, None),
        (ROPES, ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**9}, None),
        (ROPES, ROPE | LONGROPE | {"original_max_position_embeddings": 64}, None),
        (IDS, [1, "2", 3], None),
        (IDS, [1, 2], f"{IDS} must be 3"),
        (IDS, "2", f"{IDS} must be a valid list"),
        ("speculators_model_type", "dflash", "speculators_model_type must be 'eagle3'"),
        ("transformer_layer_config", None, "transformer_layer_config must be an object"),
        ("draft_vocab_size", 2.5, None),
        ("draft_vocab_size", 99, "draft_vocab_size must be 1..48"),
        ("draft_vocab_size", 20, "no tensor 'lm_head.weight'"),
        ("target_hidden_size", 64, None),
        ("norm_output", "yes", None),
    ],
)
def test_what_vllm_could_not_serve_is_refused_by_its_key(whole, policy_dir, key, value, said):
    set_field(whole, key, value)
    assert (said or key) in refusal(whole, policy_dir)


@pytest.mark.parametrize("said", [None, [], "left out"])
def test_layers_that_are_not_said_are_vllms_default_ones(tmp_path, said):
    """As in heads of speculators before 0.5, and of its `convert`."""
    policy = make_policy(num_hidden_layers=9)
    saved = save_drafter(drafter_of(policy, aux_layers=(1, 2, 3)), tmp_path / "drafter", {})
    config = json.loads((saved / "config.json").read_text()) | {IDS: said}
    if said == "left out":
        del config[IDS]
    (saved / "config.json").write_text(json.dumps(config))
    assert load_drafter(saved, policy.config).target_layer_ids == [2, 4, 6]
    assert check_drafter(saved, policy.config).config[IDS] == [2, 4, 6], "what is staged says them"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 64}, "hidden_size=64, but the policy's is 32"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 must be a multiple of num_key_value_heads=2"),
        ({"target_hidden_size": 64}, "target_hidden_size=64, but the policy's is 32"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures must name one of"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, not None"),
        ({"draft_vocab_size": 10}, "lm_head.weight is [20, 32], but config.json asks for [10, 32]"),
        ({IDS: [1, 2, 9]}, f"{IDS}=[1, 2, 9] is outside 0..3"),
        ({"fc_norm": True}, "no tensor 'fc_norm.0.weight'"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm are both true"),
    ],
)
def test_so_is_what_does_not_fit_in_other_layouts(tmp_path, policy_dir, change, sentence):
    assert sentence in refusal(written(tmp_path / "theirs", **change), policy_dir)


def test_a_drafter_for_another_policy(whole):
    assert "vocab_size=48, but the policy's is 50" in refusal(whole, make_policy(vocab_size=50).config)
    sentence = refusal(whole, make_policy(num_hidden_layers=3).config)
    assert f"config.json: {IDS}=[1, 2, 3] is outside 0..2" in sentence


def test_another_tokenizer_of_the_same_size_is_refused(drafter, policy_dir, tmp_path):
    def policy_with(words, layout):
        path = shutil.copytree(policy_dir, tmp_path / f"policy-{'-'.join(words)}-{layout}")
        content = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": []}
        (path / "tokenizer.json").write_text(json.dumps(content, indent=layout))
        return path

    saved = save_drafter(drafter, tmp_path / "drafter", {}, policy=policy_with("ab", 1))
    check_drafter(saved, policy_with("ab", 4))  # the same vocabulary, saved by another release
    check_drafter(saved, policy_dir)  # nothing to compare with
    assert "this drafter was trained for another tokenizer" in refusal(saved, policy_with("ba", 1))


def test_an_ordinary_model_is_no_drafter(policy_dir):
    assert "is no EAGLE-3 drafter" in refusal(policy_dir, policy_dir)


def test_a_folder_that_may_not_be_looked_into(whole, policy, monkeypatch):
    stat = os.stat

    def refused(path, *more, **options):
        if Path(str(path)).is_relative_to(whole):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *more, **options)

    assert f"{whole.parent / 'nowhere'} is not a directory" in refusal(whole.parent / "nowhere", policy.config)
    monkeypatch.setattr(os, "stat", refused)  # root may look anywhere
    assert f"{whole} is not a directory" in refusal(whole, policy.config)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", b"{", "config.json is not readable JSON"),
        ("config.json", b'{"a":' * 50 + b"1" + b"}" * 50, "config.json is not readable JSON: it is nested deeper"),
        ("config.json", b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "is not readable JSON: it is nested deeper"),
        ("model.safetensors", None, "model.safetensors does not exist"),
        ("model.safetensors", b"PK\x03\x04 pickled", "model.safetensors is no complete safetensors file"),
        ("model.safetensors", "half", "model.safetensors is no complete safetensors file"),
    ],
)
def test_missing_and_broken_files(whole, policy_dir, file, content, said):
    before = (whole / file).read_bytes()
    (whole / file).unlink()
    if content is not None:
        (whole / file).write_bytes(before[: len(before) // 2] if content == "half" else content)
    assert said in refusal(whole, policy_dir)


def test_a_field_that_nobody_needs_is_dropped_before_staging(whole, policy_dir):
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
        set_field(whole, key, value)
    assert to_drafter_file(load_drafter(whole, policy_dir), "float32") == before
    assert "elsewhere" not in before[0] and "/another/model" not in before[0]


def test_a_table_of_positions_is_as_long_as_the_engine_needs(whole, policy, policy_dir):
    def positions(**arguments):
        loaded = load_drafter(whole, policy_dir, **arguments)
        return loaded.config.transformer_layer_config.max_position_embeddings

    set_field(whole, f"{LAYER}max_position_embeddings", 256)
    check_drafter(whole, policy_dir, min_context=257)
    assert (positions(), positions(min_context=257)) == (256, 257)
    set_field(whole, ROPES, ROPE | {"rope_type": "dynamic", "factor": 2.0})
    assert "max_position_embeddings=256 is below 257" in refusal(whole, policy_dir, min_context=257)
    set_field(whole, f"{LAYER}max_position_embeddings", 3_000_000_000)  # 192 GB of RoPE table
    assert "positions" in refusal(whole, policy_dir)
    set_field(whole, ROPES, ROPE)
    assert positions(min_context=200) == policy.config.max_position_embeddings + 16


def test_a_table_that_is_stretched_as_the_policys_own_is_no_refusal(tmp_path):
    yarn = ROPE | {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    stretched = make_policy(max_position_embeddings=256, rope_parameters=yarn)
    saved = save_drafter(drafter_of(stretched), tmp_path / "stretched", {})
    check_drafter(saved, stretched.config)
    set_field(saved, f"{ROPES}.factor", 50.0)
    assert "ask for a table of" in refusal(saved, stretched.config)


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
    d2t = load_file(pruned / "model.safetensors")["d2t"]
    for i, value in offsets.items():
        d2t[i] = value
    set_tensors(pruned, {"d2t": d2t})
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
    set_tensors(pruned, {name: tensor})
    assert said in refusal(pruned, policy_dir)


@pytest.mark.parametrize("rates", [[0.5, "0.4"], [0.5, float("nan")], [1.5], "0.5", {"0": 0.5}, [0.1] * 17, 0.5])
def test_an_acceptance_that_is_none_is_left_out(whole, policy_dir, rates):
    (whole / "provenance.json").write_text(json.dumps({"acceptance": rates, "policy": "a"}))
    assert provenance(whole) == {"policy": "a"}
    assert run_start(whole, policy_dir).served.acceptance == ()
