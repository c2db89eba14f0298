"""Folders of drafters as different projects write them, how a test changes them, and what is said of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import VOCAB, verifier_weights

from verl_tlt.checks.models import check_recipe_drafter
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import DrafterError, check_drafter, load_drafter, refresh_verifier_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
H, DV = 32, 20
FLAT = dict(  # the fields of SpecForge's configs/qwen3-*-eagle3.json
    architectures=["LlamaForCausalLMEagle3"], attention_bias=False, bos_token_id=1, eos_token_id=2, head_dim=16,
    hidden_act="silu", hidden_size=H, intermediate_size=40, max_position_embeddings=64, model_type="llama",
    num_attention_heads=4, num_hidden_layers=1, num_key_value_heads=2, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=VOCAB, draft_vocab_size=DV,
)  # fmt: skip


def tensors_of(draft_vocab=DV, width=H):
    """Names and shapes as `Model` in SafeAILab's cnets.py registers them; SpecForge's are the same.

    `width`: of the head; the policy's is H.
    """
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "embed_tokens.weight": (VOCAB, width), "lm_head.weight": (draft_vocab, width),
        "midlayer.self_attn.q_proj.weight": (64, 2 * width), "midlayer.self_attn.k_proj.weight": (32, 2 * width),
        "midlayer.self_attn.v_proj.weight": (32, 2 * width), "midlayer.self_attn.o_proj.weight": (width, 64),
        "midlayer.mlp.gate_proj.weight": (40, width), "midlayer.mlp.up_proj.weight": (40, width),
        "midlayer.mlp.down_proj.weight": (width, 40), "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,), "midlayer.post_attention_layernorm.weight": (width,),
        "fc.weight": (width, 3 * H), "norm.weight": (width,),
    }  # fmt: skip
    tensors = {name: ("norm" in name) + 0.2 * torch.randn(s, generator=generator) for name, s in shapes.items()}
    tensors["d2t"] = torch.arange(draft_vocab)  # draft id i stands for token 2i
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][: 2 * draft_vocab : 2] = True
    return tensors


def written(path, tensors=None, **changes):
    """Their drafter's files in `path`, with other fields in its config or other tensors."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**FLAT, **changes}))
    save_file(tensors or tensors_of(), path / WEIGHTS)
    return path


def set_field(folder, key, value):
    """Change a field of config.json; a dotted key reaches into objects."""
    config = at = json.loads((folder / "config.json").read_text())
    *path, last = key.split(".")
    for part in path:
        at = at[part]
    at[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def set_tensors(folder, tensors):
    """Change or add tensors of a folder's one file."""
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS)


def sharded(path, parts=3):
    """The tensors of a folder's one file in several, with their index."""
    tensors, table = load_file(path / WEIGHTS), {}
    (path / WEIGHTS).unlink()
    for part in range(parts):
        held = {key: tensors[key] for key in sorted(tensors)[part::parts]}
        save_file(held, path / f"model-{part}.safetensors", {"format": "pt"})
        table |= dict.fromkeys(held, f"model-{part}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": table}))
    return path


def loaded(path, policy, policy_dir):
    """A drafter of this folder with the policy's embedding and head."""
    model = load_drafter(path, policy_dir, min_context=200)  # its own 64 positions are a training length
    refresh_verifier_weights(model, verifier_weights(policy))
    return model


def refusal(folder, policy, min_context=200):
    """The one sentence of check and load, and of the doctor where the policy is a folder."""
    with pytest.raises(DrafterError) as caught:
        check_drafter(folder, policy, min_context)
    with pytest.raises(DrafterError) as again:
        load_drafter(folder, policy, min_context=min_context)
    sentence = str(caught.value)
    assert str(again.value) == sentence and str(folder) in sentence
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 500
    if isinstance(policy, Path):
        settings = TLTConfig.from_dict({"drafter": {"path": str(folder)}})
        found = check_recipe_drafter(settings, str(policy), min_context - settings.speculation.max_draft_length)
        assert (found.level, found.sentence) == ("refuse", f"tlt.drafter.path: {sentence}")
    return sentence
