"""Heads of another width than their policy, such as SafeAILab's for Llama-3.3-70B: 6,144 beside 8,192."""

import json

import pytest
import torch
from drafter_bits import fingerprint
from drafter_folders import DV, WEIGHTS, H, loaded, refusal, tensors_of, written
from safetensors.torch import load, load_file, save_file
from tiny_policy import VOCAB
from transformers import LlamaConfig
from vllm_by_hand import Reference, passes

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    align,
    check_drafter,
    drafter_config,
    host_bytes,
    load_drafter,
    save_drafter,
    serving_tensors,
    session_bytes,
)
from verl_tlt.drafter.build import halve_frozen, instantiate
from verl_tlt.trainer.run_setup import first_drafter

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NORMS = {
    None: {},
    "fc_norm": {f"fc_norm.{i}.weight": torch.linspace(0.5 + i, 1.5 + i, H) for i in range(3)},
    "norm_before_fc": {"input_norm.weight": torch.linspace(0.5, 2.0, 3 * H)},
}


def head(path, width=24, norm=None, draft_vocab=DV):
    """Its files in SafeAILab's layout; without maps where it drafts all tokens."""
    fields = {"hidden_size": width, "target_hidden_size": H, "draft_vocab_size": draft_vocab}
    maps = ("d2t", "t2d") if draft_vocab == VOCAB else ()
    tensors = {name: tensor for name, tensor in tensors_of(draft_vocab, width).items() if name not in maps}
    return written(path, tensors | NORMS[norm], **fields, **({norm: True} if norm else {}))


@pytest.mark.parametrize(("width", "norm"), [(24, None), (24, "fc_norm"), (24, "norm_before_fc"), (H, None)])
def test_it_computes_what_its_own_project_computes(policy, policy_dir, sequences, tmp_path, width, norm):
    model = loaded(head(tmp_path, width, norm), policy, policy_dir)
    given, sequence = tensors_of(DV, width), sequences[0]
    own = {name: given[name] for name in (EMBEDDING, HEAD, "fc.weight")}
    if width == H:
        own[EMBEDDING] = policy.model.embed_tokens.weight
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in own.items())
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in NORMS[norm].items())
    assert torch.equal(model.verifier_lm_head.weight, policy.lm_head.weight[0 : 2 * DV : 2]), (
        "its teacher is the policy"
    )
    reference, seen = Reference(model), passes(model, align(sequence), 2)
    for t in range(4, 9):
        for k, drafted in enumerate(reference.draft(sequence, t, 2)):
            torch.testing.assert_close(seen[k][0][t], drafted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen[0][1][t], reference.policy(sequence, t + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft_vocab", [DV, VOCAB])
def test_in_speculators_layout_it_is_the_same_head(policy_dir, tmp_path, draft_vocab):
    path = head(tmp_path / "theirs", draft_vocab=draft_vocab)
    given = serving_tensors(load_drafter(path, policy_dir))
    assert {EMBEDDING, HEAD} <= given.keys()
    saved = save_drafter(load_drafter(path, policy_dir), tmp_path / "ours", {})
    config = json.loads((saved / "config.json").read_text())
    assert (config["target_hidden_size"], config.pop("own_head")) == (H, True)
    (saved / "config.json").write_text(json.dumps(config))  # as others write it, who do not say whose the head is
    (saved / "provenance.json").unlink()
    assert check_drafter(saved, policy_dir).config["own_head"] is True
    assert fingerprint(serving_tensors(load_drafter(saved, policy_dir))) == fingerprint(given)


@pytest.mark.parametrize("missing", [EMBEDDING, HEAD])
def test_without_its_own_embedding_or_head_it_is_refused(policy_dir, tmp_path, missing):
    path = head(tmp_path, draft_vocab=VOCAB)
    save_file({n: t for n, t in load_file(path / WEIGHTS).items() if n != missing}, path / WEIGHTS)
    sentence = refusal(path, policy_dir)
    assert f"{path / WEIGHTS} has no tensor '{missing}'" in sentence and "with verl-tlt warmup" in sentence


def test_what_a_run_starts_with_has_its_own_embedding_and_counts_the_policys_states(policy_dir, tmp_path):
    settings, given = TLTConfig.from_dict({"drafter": {"path": str(head(tmp_path))}}), tensors_of(width=24)
    start = first_drafter(settings, str(policy_dir), "float32", 64, None)
    assert start.token_bytes == (3 + 1) * H * 2 and start.chosen
    for file in (start.trainable, start.served):
        assert all(torch.equal(load(file.weights)[name], given[name]) for name in (EMBEDDING, HEAD))


def test_on_an_accelerator_the_policys_weights_alone_are_in_16_bits(policy, policy_dir, tmp_path):
    model = loaded(head(tmp_path), policy, policy_dir)
    DrafterTrainer(model).rehearse()
    halve_frozen(model)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters() if not parameter.requires_grad}
    policys = dict.fromkeys(("verifier_lm_head.weight", "verifier_norm.weight"), torch.bfloat16)
    assert kinds == {EMBEDDING: torch.float32, HEAD: torch.float32} | policys


def test_memory_counts_its_weights_by_its_own_width_and_states_by_the_policys():
    """By shapes of the head for Llama-3.3-70B."""
    width, policys, vocab, drafted, mlp, kv = 6144, 8192, 128_256, 32_000, 16_384, 8 * 128
    shape = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=80, num_attention_heads=48, num_key_value_heads=8,
        vocab_size=vocab, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    )  # fmt: skip

    def head_for(policys):
        config = drafter_config(shape, draft_vocab_size=drafted)
        config.target_hidden_size, config.own_head = policys, True
        with torch.device("meta"):
            return instantiate(config, "sdpa")

    attention = 2 * width * (width + 2 * kv) + width * width
    trained = 4 * (3 * policys * width + attention + 3 * width * mlp)
    own, teacher, whole = 4 * width * (vocab + drafted), 2 * policys * drafted, 2 * policys * vocab
    model, copies = head_for(policys), 1 + 3 + 4  # see test_device_residency.py
    assert host_bytes(model) == pytest.approx(copies * trained + own + teacher + whole, rel=0.001)
    # A policy that is one wider: a column of `fc` for each layer, of the teacher and of the whole head, and its states.
    wider = session_bytes(head_for(policys + 1), 256, 1, 8192) - session_bytes(model, 256, 1, 8192)
    assert wider == pytest.approx(3 * width * 4 * 5.5 + 2 * drafted + 2 * vocab + 8192 * 4 * 10, rel=0.001)
