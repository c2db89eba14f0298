"""Drafters in the layouts of SafeAILab/EAGLE and SpecForge: the same network under other names, or one sentence."""

import json
from pathlib import Path

import pytest
import torch
from cli import cli
from drafter_folders import DV, WEIGHTS, H, refusal, run_start, tensors_of, written
from safetensors.torch import load_file
from tiny_policy import VOCAB, verifier_weights
from vllm_by_hand import passes

from verl_tlt.drafter import (
    DrafterError,
    check_drafter,
    load_drafter,
    pack,
    policy_shape,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
)
from verl_tlt.drafter.build import has_own_head
from verl_tlt.drafter.head_config import read_config

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def theirs(tmp_path):
    return written(tmp_path / "theirs")


@pytest.fixture
def refreshed(policy, policy_dir):
    """Loads a drafter with the policy's embedding and head."""

    def load(path):
        model = load_drafter(path, policy_dir, min_context=200)  # its own 64 positions are a training length
        refresh_verifier_weights(model, verifier_weights(policy))
        return model

    return load


def test_converted_it_is_a_drafter_like_any_other(theirs, policy_dir, sequences, refreshed, tmp_path):
    model = refreshed(theirs)
    save_drafter(model, tmp_path / "ours", {"converted from": "theirs"})
    check_drafter(tmp_path / "ours", policy_dir)
    again, batch = refreshed(tmp_path / "ours"), pack(sequences)
    assert all(torch.equal(t, serving_tensors(again)[n]) for n, t in serving_tensors(model).items())
    for (one, _), (two, _) in zip(passes(model, batch), passes(again, batch), strict=True):
        assert torch.equal(one, two)


def test_a_whole_vocabulary_keeps_its_head_too_unless_its_map_moves_tokens(policy, policy_dir, refreshed, tmp_path):
    tensors = tensors_of(VOCAB)
    tensors["d2t"].zero_()
    model = refreshed(written(tmp_path, tensors, draft_vocab_size=VOCAB))
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


def test_without_t2d_it_drafts_the_tokens_that_d2t_names(theirs, policy, tmp_path):
    whole, tensors = serving_tensors(load_drafter(theirs, policy.config)), tensors_of()
    del tensors["t2d"]
    written(tmp_path / "less", tensors)
    modelopt = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items() if "embed" not in name}
    written(tmp_path / "modelopt", modelopt, eagle_config={IDS: [0, 1, 2], "use_last_layernorm": True})
    for path in (tmp_path / "less", tmp_path / "modelopt"):
        less = load_drafter(path, policy.config)
        assert less.t2d.nonzero().flatten().tolist() == list(range(0, 2 * DV, 2))
        assert all(torch.equal(tensor, whole[name]) for name, tensor in serving_tensors(less).items())
        assert less.target_layer_ids == [1, 2, 3]


def test_tokens_in_the_order_of_their_frequency_are_sorted(theirs, policy, tmp_path):
    """As ModelOpt writes them; vLLM takes any order."""
    tensors, order = tensors_of(), torch.randperm(DV, generator=torch.Generator().manual_seed(0))
    tokens = (torch.arange(DV) + tensors["d2t"])[order]
    shuffled = tensors | {"d2t": tokens - torch.arange(DV), "lm_head.weight": tensors["lm_head.weight"][order]}
    found = serving_tensors(load_drafter(written(tmp_path / "modelopt", shuffled), policy.config))
    for name, tensor in serving_tensors(load_drafter(theirs, policy.config)).items():
        assert torch.equal(found[name], tensor), name


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


MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": MROPE}, {"rope_scaling": MROPE | {"rope_type": "default", "type": "default"}},
     {"rope_parameters": {**MROPE, "rope_type": "mrope", "rope_theta": 1e4}, "rope_scaling": None}],
)  # fmt: skip
def test_heads_of_vision_language_models_rotate_by_the_position_of_text(policy_dir, tmp_path, rope):
    written(tmp_path / "theirs", architectures=["Eagle3Qwen3vlForCausalLM"], rope_theta=1e4, **rope)
    check_drafter(tmp_path / "theirs", policy_dir)
    layer = load_drafter(tmp_path / "theirs", policy_dir).config.transformer_layer_config
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_a_whole_vocabulary_without_a_head_drafts_with_the_policys(policy, policy_dir, refreshed, tmp_path):
    tensors = {n: t for n, t in tensors_of(VOCAB).items() if n not in ("lm_head.weight", "d2t", "t2d")}
    model = refreshed(written(tmp_path, tensors, draft_vocab_size=VOCAB))
    assert not has_own_head(model) and torch.equal(model.lm_head.weight, policy.lm_head.weight)
    assert "lm_head.weight" not in serving_tensors(model)
    with_copy = tensors | {"lm_head.weight": policy.lm_head.weight.detach().clone()}  # as ModelOpt writes it
    assert not has_own_head(load_drafter(written(tmp_path, with_copy, draft_vocab_size=VOCAB), policy_dir))
    pruned = {n: t for n, t in tensors_of().items() if n != "lm_head.weight"}
    assert "no tensor 'lm_head.weight'" in refusal(written(tmp_path, pruned), policy_dir)


def test_no_pickle_is_read(theirs, policy_dir, monkeypatch):
    torch.save(load_file(theirs / WEIGHTS), theirs / "pytorch_model.bin")
    (theirs / WEIGHTS).unlink()
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    sentence = refusal(theirs, policy_dir)
    assert "pytorch_model.bin is pickled, " in sentence and "write model.safetensors beside" in sentence
    with pytest.raises(DrafterError, match="is pickled"):
        run_start(theirs, policy_dir)


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
