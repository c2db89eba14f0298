"""What a drafter's config says: carried over as vLLM reads it, refused in a sentence, or dropped."""

import json
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
from drafter_bits import fingerprint
from drafter_folders import refusal, set_field, set_tensors, sharded, written
from safetensors.torch import load_file
from tiny_policy import drafter_of, make_policy

from verl_tlt.drafter import DrafterError, check_drafter, load_drafter, save_drafter, serving_tensors, to_drafter_file
from verl_tlt.drafter.check import tokenizer_facts

LAYER, IDS = "transformer_layer_config.", "eagle_aux_hidden_state_layer_ids"
ROPES, ROPE = f"{LAYER}rope_parameters", {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture
def pruned(policy, tmp_path):
    return save_drafter(drafter_of(policy, draft_ids=torch.tensor([1, 4, 30, 47])), tmp_path / "pruned", {})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("quantization_config", {"quant_method": "fp8"}, None),
        (f"{LAYER}quantization_config", {"quant_method": "fp8"}, None),
        (f"{LAYER}model_type", "qwen3", "of model_type 'llama', not 'qwen3'"),
        (f"{LAYER}layer_types", ["sliding_attention"], None),
        (f"{LAYER}num_hidden_layers", 2, "num_hidden_layers=2, but"),
        (f"{LAYER}rms_norm_eps", "1e-6", "rms_norm_eps"),
        (f"{LAYER}num_key_value_heads", 0, None),
        (f"{LAYER}num_key_value_heads", 1, "k_proj.weight is [32, 64], but config.json asks for [16, 64]"),
        (ROPES, [1], None),
        (ROPES, ROPE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (IDS, [1, "2", 3], None),
        (IDS, [1, 2], f"{IDS} must be 3"),
        (IDS, "2", f"{IDS} must be a list"),
        ("speculators_model_type", "dflash", "its speculators_model_type is 'dflash'"),
        ("transformer_layer_config", None, "transformer_layer_config must describe a layer"),
        ("draft_vocab_size", 2.5, None),
        ("draft_vocab_size", 99, "draft_vocab_size must be 1..48"),
        ("draft_vocab_size", 20, "no tensor 'd2t'"),
    ],
)
def test_what_vllm_could_not_serve_is_refused_by_its_key(saved, policy_dir, key, value, said):
    set_field(saved, key, value)
    assert (said or key.rpartition(".")[2]) in refusal(saved, policy_dir)


@pytest.mark.parametrize("said", [None, []])
def test_layers_that_are_not_said_are_vllms_default_ones(tmp_path, said):
    """As in heads of speculators before 0.5, and of its `convert`."""
    policy = make_policy(num_hidden_layers=9)
    path = save_drafter(drafter_of(policy, aux_layers=(1, 2, 3)), tmp_path / "drafter", {})
    set_field(path, IDS, said)
    assert load_drafter(path, policy.config).target_layer_ids == [2, 4, 6]
    assert check_drafter(path, policy.config).config[IDS] == [2, 4, 6], "what is staged says them"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 64}, "hidden_size=64, but the policy's is 32"),
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"target_hidden_size": 64}, "target_hidden_size=64, but the policy's is 32"),
        ({"hidden_size": 24, "target_hidden_size": 32}, "config.json asks for [48, 24]"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures must name one of"),
        ({"draft_vocab_size": 10}, "d2t is [20], but config.json asks for [10]"),
        ({IDS: [1, 2, 9]}, f"{IDS}=[1, 2, 9] is outside 0..3"),
        ({"fc_norm": True}, "no tensor 'fc_norm.0.weight'"),
        ({"fc_norm": True, "norm_before_fc": True}, "mutually exclusive"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_so_is_what_does_not_fit_in_other_layouts(tmp_path, policy_dir, change, sentence):
    assert sentence in refusal(written(tmp_path / "theirs", **change), policy_dir)


def test_a_drafter_for_another_policy(saved):
    assert "vocab_size=48, but the policy's is 50" in refusal(saved, make_policy(vocab_size=50).config)
    sentence = refusal(saved, make_policy(num_hidden_layers=3).config)
    assert f"config.json: {IDS}=[1, 2, 3] is outside 0..2" in sentence


@pytest.mark.parametrize("content", [{"model": 3}, {"added_tokens": [1]}])
def test_a_tokenizer_of_another_kind_is_a_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DrafterError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_facts(tmp_path)


def test_another_tokenizer_of_the_same_size_is_refused(drafter, policy_dir, tmp_path):
    def policy_with(words, layout):
        path = shutil.copytree(policy_dir, tmp_path / f"policy-{'-'.join(words)}-{layout}")
        content = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": []}
        (path / "tokenizer.json").write_text(json.dumps(content, indent=layout))
        return path

    saved = save_drafter(drafter, tmp_path / "drafter", {}, policy=policy_with("ab", 1))
    check_drafter(saved, policy_with("ab", 4))  # the same vocabulary, saved by another release
    check_drafter(saved, policy_dir)  # nothing to compare with
    check_drafter(saved, policy_with("abc", 1))  # one token more, within the padded vocabulary
    check_drafter(saved, policy_with("a", 1))  # and one less
    for other in ("ba", "bac", "axc"):
        assert "this drafter was trained for another tokenizer" in refusal(saved, policy_with(other, 1))


def test_what_is_no_drafters_folder(saved, policy, policy_dir, monkeypatch):
    assert f"{saved.parent / 'nowhere'} is not a directory" in refusal(saved.parent / "nowhere", policy.config)
    assert "is no EAGLE-3 drafter" in refusal(policy_dir, policy_dir)
    (saved / "config.json").write_text("{")
    assert "config.json is not readable JSON" in refusal(saved, policy_dir)
    with monkeypatch.context() as patch:  # root may look anywhere
        patch.setattr(os, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert f"{saved} is not a directory" in refusal(saved, policy.config)


def test_a_field_that_nobody_needs_is_dropped_before_staging(saved, policy_dir):
    before = to_drafter_file(load_drafter(saved, policy_dir), "float32")
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
        f"{LAYER}layer_types": ["full_attention"] * 3,
        f"{LAYER}_attn_implementation": "elsewhere",
    }.items():
        set_field(saved, key, value)
    assert to_drafter_file(load_drafter(saved, policy_dir), "float32") == before
    assert "elsewhere" not in before[0] and "/another/model" not in before[0]


def test_a_table_of_positions_is_as_long_as_the_engine_needs(saved, policy, policy_dir):
    def positions(**arguments):
        loaded = load_drafter(saved, policy_dir, **arguments)
        return loaded.config.transformer_layer_config.max_position_embeddings

    set_field(saved, f"{LAYER}max_position_embeddings", 256)
    check_drafter(saved, policy_dir, min_context=257)
    assert (positions(), positions(min_context=257)) == (256, 257)
    set_field(saved, ROPES, ROPE | {"rope_type": "dynamic", "factor": 2.0})
    assert "has 256 positions in vLLM" in refusal(saved, policy_dir, min_context=257)
    yarn = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    set_field(saved, ROPES, yarn)  # whose table has 400 rows in vLLM
    assert positions(min_context=400) == 416
    assert "has 416 positions in vLLM" in refusal(saved, policy_dir, min_context=417)
    set_field(saved, ROPES, ROPE)
    set_field(saved, f"{LAYER}max_position_embeddings", 3_000_000_000)  # 192 GB of RoPE table
    assert positions(min_context=200) == policy.config.max_position_embeddings + 16


def test_numbers_that_are_not_finite_are_not_loaded(saved, policy_dir):
    set_tensors(saved, {"fc.weight": torch.full((32, 96), torch.nan)})
    with pytest.raises(DrafterError, match=r"fc\.weight holds NaN or infinity"):
        load_drafter(saved, policy_dir)


def test_a_head_in_several_files_is_one_in_one_file(saved, policy_dir, tmp_path):
    for path in (saved, written(tmp_path / "theirs")):
        whole = serving_tensors(load_drafter(path, policy_dir))
        assert fingerprint(serving_tensors(load_drafter(sharded(path), policy_dir))) == fingerprint(whole)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({0: -2}, "the tokens i + d2t[i] must be distinct and within 0..47"),
        ({3: 45}, "the tokens i + d2t[i] must be distinct and within 0..47"),
        ({1: 0}, "the tokens i + d2t[i] must be distinct"),
    ],
)
def test_the_map_stays_within_the_vocabulary(pruned, policy_dir, offsets, said):
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
        ("mask_hidden", torch.zeros(1, 96), "mask_hidden, which the network"),
        ("embed_tokens.weight", torch.zeros(10, 32), "embed_tokens.weight is [10, 32], but config.json asks for [48"),
        ("embed_tokens.weight", torch.zeros(48, 32, dtype=torch.int64), "embed_tokens.weight holds I64"),
    ],
)
def test_tensors_are_those_of_the_network(pruned, policy_dir, name, tensor, said):
    set_tensors(pruned, {name: tensor})
    assert said in refusal(pruned, policy_dir)
