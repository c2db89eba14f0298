"""Drafters in the layouts of SafeAILab/EAGLE and SpecForge: the same network under other names, or one sentence."""

import json
from pathlib import Path

import pytest
import torch
from cli import cli
from drafter_bits import fingerprint
from drafter_folders import DV, H, loaded, refusal, tensors_of, written
from tiny_policy import VOCAB

from verl_tlt.drafter import (
    check_drafter,
    load_drafter,
    policy_shape,
    provenance,
    save_drafter,
    serving_tensors,
)
from verl_tlt.drafter.build import has_own_head
from verl_tlt.drafter.head_config import read_config

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def theirs(tmp_path):
    return written(tmp_path / "theirs")


def test_a_whole_vocabulary_keeps_its_head_too_unless_its_map_moves_tokens(policy, policy_dir, tmp_path):
    tensors = tensors_of(VOCAB)
    tensors["d2t"].zero_()
    model = loaded(written(tmp_path, tensors, draft_vocab_size=VOCAB), policy, policy_dir)
    assert not model.use_draft_vocab
    assert torch.equal(serving_tensors(model)["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(model.verifier_lm_head.weight, policy.lm_head.weight)
    tensors["d2t"] = torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)  # vLLM would draft by it
    assert "d2t must be zero" in refusal(written(tmp_path, tensors, draft_vocab_size=VOCAB), policy_dir)


def test_newer_norms_are_carried_over(policy, tmp_path):
    norms = {f"fc_norm.{i}.weight": torch.full((H,), 1.0 + i) for i in range(3)}
    model = load_drafter(written(tmp_path, tensors_of() | norms, fc_norm=True, norm_output=True), policy.config)
    assert model.config.norm_output and torch.equal(model.fc_norm[2].weight, norms["fc_norm.2.weight"])
    layer = read_config(tmp_path, policy_shape(policy.config))["transformer_layer_config"]
    assert layer["fc_norm"] and layer["norm_output"]  # vLLM 0.24 hands on what is in here alone


def test_what_modelopt_writes_is_the_same_drafter(theirs, policy, tmp_path):
    """Tokens in the order of their frequency, which vLLM takes too, and neither `t2d` nor an embedding."""
    order = torch.randperm(DV, generator=torch.Generator().manual_seed(0))
    tensors = {n: t for n, t in tensors_of().items() if n not in ("t2d", "embed_tokens.weight")}
    tokens = (torch.arange(DV) + tensors["d2t"])[order]
    tensors |= {"d2t": tokens - torch.arange(DV), "lm_head.weight": tensors["lm_head.weight"][order]}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    written(tmp_path / "modelopt", tensors, eagle_config={IDS: [0, 1, 2], "use_last_layernorm": True})
    found = load_drafter(tmp_path / "modelopt", policy.config)
    assert found.t2d.nonzero().flatten().tolist() == list(range(0, 2 * DV, 2))
    assert fingerprint(serving_tensors(found)) == fingerprint(serving_tensors(load_drafter(theirs, policy.config)))


@pytest.mark.parametrize(
    ("said", "nested", "read"),
    [(None, None, [1, 2, 3]), ([0, 1, 2], None, [0, 1, 2]), ([0, 1, 3], None, [0, 1, 3]),
     (None, [0, 1, 2], [1, 2, 3]), ([1, 2, 3], [0, 1, 2], [1, 2, 3]),
     (None, [1, 2, 3], None), (None, [0, 1, 3], None), ([0, 1, 2], [0, 1, 2], None), ([1, 2, 3], [1, 2, 3], None)],
)  # fmt: skip
def test_layers_that_readers_count_differently_are_not_guessed(policy_dir, tmp_path, said, nested, read):
    written(tmp_path, **({IDS: said} if said else {}), **({"eagle_config": {IDS: nested}} if nested else {}))
    if read:
        assert load_drafter(tmp_path, policy_dir).target_layer_ids == read
    else:
        sentence = refusal(tmp_path, policy_dir)
        assert f"eagle_config.{IDS}={nested} is ambiguous" in sentence and f"set {IDS} to the layers" in sentence


@pytest.mark.parametrize("said", [True, False, None])
def test_where_the_residual_is_taken_is_carried_over(policy, tmp_path, said):
    """vLLM's default is after the norm in a flat config, and before it in speculators' layout."""
    more = {} if said is None else {"norm_before_residual": said}
    flat = load_drafter(written(tmp_path / "flat", **more), policy.config)
    assert flat.config.norm_before_residual is bool(said)
    saved = save_drafter(flat, tmp_path / "nested", {})
    config = json.loads((saved / "config.json").read_text())
    del config["norm_before_residual"]
    (saved / "config.json").write_text(json.dumps(config | more))
    assert load_drafter(saved, policy.config).config.norm_before_residual is (said is None or said)


def test_heads_of_vision_language_models_rotate_by_the_position_of_text(policy, tmp_path):
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    model = load_drafter(written(tmp_path, architectures=["Eagle3Qwen3vlForCausalLM"], **rope), policy.config)
    assert model.config.transformer_layer_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_a_whole_vocabulary_without_a_head_drafts_with_the_policys(policy, policy_dir, tmp_path):
    tensors = {n: t for n, t in tensors_of(VOCAB).items() if n not in ("lm_head.weight", "d2t", "t2d")}
    model = loaded(written(tmp_path, tensors, draft_vocab_size=VOCAB), policy, policy_dir)
    assert not has_own_head(model) and torch.equal(model.lm_head.weight, policy.lm_head.weight)
    assert "lm_head.weight" not in serving_tensors(model)
    with_copy = tensors | {"lm_head.weight": policy.lm_head.weight.detach().clone()}  # as ModelOpt writes it
    assert not has_own_head(load_drafter(written(tmp_path, with_copy, draft_vocab_size=VOCAB), policy_dir))
    pruned = {n: t for n, t in tensors_of().items() if n != "lm_head.weight"}
    assert "no tensor 'lm_head.weight'" in refusal(written(tmp_path, pruned), policy_dir)


def test_convert_writes_it_or_says_what_is_wrong(theirs, policy_dir, tmp_path):
    def convert(out):
        return cli("convert", theirs, "--model", policy_dir, "--out", out)

    assert convert(tmp_path / "ours")[0] == 0
    check_drafter(tmp_path / "ours", policy_dir)
    assert provenance(tmp_path / "ours")["converted from"] == str(theirs)
    assert "exists" in convert(tmp_path / "ours")[1]
    for place in (Path("/proc/tlt/drafter"), theirs / "config.json" / "drafter"):
        code, said = convert(place)
        assert code == 1 and "cannot be written to" in said and "--out" in said
    written(theirs, hidden_size=64)
    code, said = convert(tmp_path / "none")
    assert code == 1 and "hidden_size=64" in said
    assert not (tmp_path / "none").exists()
