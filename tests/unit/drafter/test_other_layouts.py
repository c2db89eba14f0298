"""Drafters in the layouts of SafeAILab/EAGLE and SpecForge: the same network under other names, or one sentence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import VOCAB, verifier_weights
from typer.testing import CliRunner
from vllm_by_hand import Reference, passes

from verl_tlt.commands.cli import app
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    align,
    check_drafter,
    load_drafter,
    pack,
    policy_shape,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
)
from verl_tlt.drafter.check import read_config
from verl_tlt.trainer.run_setup import first_drafter

H, DV = 32, 20
FLAT = dict(  # the fields of SpecForge's configs/qwen3-*-eagle3.json
    architectures=["LlamaForCausalLMEagle3"], attention_bias=False, bos_token_id=1, eos_token_id=2, head_dim=16,
    hidden_act="silu", hidden_size=H, intermediate_size=40, max_position_embeddings=64, model_type="llama",
    num_attention_heads=4, num_hidden_layers=1, num_key_value_heads=2, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=VOCAB, draft_vocab_size=DV,
)  # fmt: skip


def tensors_of(draft_vocab=DV):
    """Names and shapes as `Model` in SafeAILab's cnets.py registers them; SpecForge's are the same."""
    generator = torch.Generator().manual_seed(4)

    def weight(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    block = "midlayer."
    tensors = {
        "embed_tokens.weight": weight(VOCAB, H),
        "lm_head.weight": weight(draft_vocab, H),
        f"{block}self_attn.q_proj.weight": weight(4 * 16, 2 * H),
        f"{block}self_attn.k_proj.weight": weight(2 * 16, 2 * H),
        f"{block}self_attn.v_proj.weight": weight(2 * 16, 2 * H),
        f"{block}self_attn.o_proj.weight": weight(H, 4 * 16),
        f"{block}mlp.gate_proj.weight": weight(40, H),
        f"{block}mlp.up_proj.weight": weight(40, H),
        f"{block}mlp.down_proj.weight": weight(H, 40),
        f"{block}hidden_norm.weight": 1 + weight(H),
        f"{block}input_layernorm.weight": 1 + weight(H),
        f"{block}post_attention_layernorm.weight": 1 + weight(H),
        "fc.weight": weight(H, 3 * H),
        "norm.weight": 1 + weight(H),
        "d2t": torch.arange(draft_vocab),  # draft id i stands for token 2i
        "t2d": torch.zeros(VOCAB, dtype=torch.bool),
    }
    tensors["t2d"][: 2 * draft_vocab : 2] = True
    return tensors


def written(path, tensors=None, **changes):
    """Their drafter's files in `path`, with other fields in its config or other tensors."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**FLAT, **changes}))
    save_file(tensors or tensors_of(), path / "model.safetensors")
    return path


@pytest.fixture
def theirs(tmp_path):
    return written(tmp_path / "theirs")


def test_it_computes_what_its_own_project_computes(theirs, policy, sequences):
    model = load_drafter(theirs, policy.config)
    refresh_verifier_weights(model, verifier_weights(policy))
    given = tensors_of()
    assert torch.equal(model.lm_head.weight, given["lm_head.weight"])  # its own head stays
    assert torch.equal(model.verifier_lm_head.weight, policy.lm_head.weight[0 : 2 * DV : 2])  # its teacher is ours
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, given["midlayer.self_attn.q_proj.weight"])
    reference = Reference(model)
    sequence = sequences[0]
    seen = passes(model, align(sequence), 2)
    for t in range(4, 9):
        drafted = reference.draft(sequence, t, 2)
        for k in range(2):
            torch.testing.assert_close(seen[k][0][t], drafted[k], rtol=1e-4, atol=1e-4)


def test_converted_it_is_a_drafter_like_any_other(theirs, policy, policy_dir, sequences, tmp_path):
    model = load_drafter(theirs, policy_dir, min_context=200)  # its own 64 positions are a training length
    refresh_verifier_weights(model, verifier_weights(policy))
    save_drafter(model, tmp_path / "ours", {"converted from": "theirs"})
    check_drafter(tmp_path / "ours", policy_dir)
    again = load_drafter(tmp_path / "ours", policy_dir)
    assert all(torch.equal(t, serving_tensors(again)[n]) for n, t in serving_tensors(model).items())
    refresh_verifier_weights(again, verifier_weights(policy))
    batch = pack(sequences)
    for (one, _), (two, _) in zip(passes(model, batch), passes(again, batch), strict=True):
        assert torch.equal(one, two)
    assert "head is its own" in (tmp_path / "ours" / "README.md").read_text()


def test_a_whole_vocabulary_keeps_its_head_too(policy, policy_dir, tmp_path):
    tensors = tensors_of(VOCAB)
    tensors["d2t"].zero_()
    model = load_drafter(written(tmp_path, tensors, draft_vocab_size=VOCAB), policy_dir)
    refresh_verifier_weights(model, verifier_weights(policy))
    assert not model.use_draft_vocab
    assert torch.equal(serving_tensors(model)["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(model.verifier_lm_head.weight, policy.lm_head.weight)


def test_newer_norms_are_carried_over(policy, tmp_path):
    written(tmp_path, fc_norm=True, norm_output=True)
    with pytest.raises(DrafterError, match=r"no tensor 'fc_norm\.0\.weight'"):
        load_drafter(tmp_path, policy.config)
    with pytest.raises(DrafterError, match="norm_before_fc and fc_norm are both true"):
        load_drafter(written(tmp_path, fc_norm=True, norm_before_fc=True), policy.config)
    norms = {f"fc_norm.{i}.weight": torch.full((H,), 1.0 + i) for i in range(3)}
    model = load_drafter(written(tmp_path, tensors_of() | norms, fc_norm=True, norm_output=True), policy.config)
    assert model.config.norm_output and torch.equal(model.fc_norm[2].weight, norms["fc_norm.2.weight"])
    layer = read_config(tmp_path, policy_shape(policy.config))["transformer_layer_config"]
    assert layer["fc_norm"] and layer["norm_output"]  # vLLM 0.24 hands on what is in here alone


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 64}, "hidden_size=64, but the policy's is 32"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 must be a multiple of num_key_value_heads=2"),
        ({"target_hidden_size": 64}, "target_hidden_size=64, but the policy's is 32"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures must name one of"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, not None"),
        ({"draft_vocab_size": 10}, "lm_head.weight is [20, 32], but config.json asks for [10, 32]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "eagle_aux_hidden_state_layer_ids=[1, 2, 9] is outside 0..3"),
    ],
)
def test_what_does_not_fit_is_named(theirs, policy, change, sentence):
    written(theirs, **change)
    with pytest.raises(DrafterError) as caught:
        load_drafter(theirs, policy.config)
    assert sentence in str(caught.value) and str(theirs) in str(caught.value)


def test_an_ordinary_model_is_no_drafter(policy, policy_dir):
    with pytest.raises(DrafterError, match="is no EAGLE-3 drafter"):
        check_drafter(policy_dir, policy.config)


def test_no_pickle_is_read(theirs, policy, policy_dir, monkeypatch):
    torch.save(load_file(theirs / "model.safetensors"), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    for read in (check_drafter, load_drafter):
        with pytest.raises(DrafterError, match=r"pytorch_model\.bin is pickled, .* write model\.safetensors beside"):
            read(theirs, policy.config)
    settings = TLTConfig.from_dict({"drafter": {"path": str(theirs)}})
    with pytest.raises(DrafterError, match="is pickled"):
        first_drafter(settings, str(policy_dir), "float32", 64, None)


def test_convert_writes_it_or_says_what_is_wrong(theirs, policy_dir, tmp_path):
    def convert(out):
        words = ["convert", theirs, "--model", policy_dir, "--out", out]
        return CliRunner().invoke(app, [str(word) for word in words])

    assert convert(tmp_path / "ours").exit_code == 0
    check_drafter(tmp_path / "ours", policy_dir)
    assert provenance(tmp_path / "ours")["converted from"] == str(theirs)
    assert "exists" in convert(tmp_path / "ours").output
    for place in (Path("/proc/tlt/drafter"), theirs / "config.json" / "drafter"):
        refused = convert(place)
        assert refused.exit_code == 1 and "cannot be written to" in refused.output and "--out" in refused.output
    written(theirs, hidden_size=64)
    refused = convert(tmp_path / "none")
    assert refused.exit_code == 1 and "hidden_size=64" in refused.output
    assert not (tmp_path / "none").exists()
