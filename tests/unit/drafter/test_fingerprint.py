"""The fingerprint: the same for the trainer's tensors and vLLM's, another for any other weights."""

import pytest
import torch

from verl_tlt.drafter import fingerprint, serving_tensors


def as_vllm_holds_them(tensors, dtype):
    """Fused and renamed as `Eagle3LlamaForCausalLM.named_parameters()` has them."""
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    own = {name: t.to(dtype) for name, t in tensors.items()}
    fused = {
        f"model.{attention}qkv_proj.weight": torch.cat([own.pop(f"{attention}{x}_proj.weight") for x in "qkv"]),
        f"model.{mlp}gate_up_proj.weight": torch.cat([own.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]),
        "draft_id_to_target_id": torch.zeros(48, dtype=torch.int64),
        "model.embed_tokens.weight": torch.rand(48, 32),
        "lm_head.weight": torch.rand(48, 32),
    }
    return list({**{f"model.{name}": t for name, t in own.items()}, **fused}.items())[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_on_both_sides(drafter, dtype):
    tensors = serving_tensors(drafter)
    assert fingerprint(as_vllm_holds_them(tensors, dtype)) == fingerprint(tensors, dtype)
    assert fingerprint(serving_tensors(drafter, dtype)) == fingerprint(tensors, dtype)


def test_the_serving_dtype_is_part_of_it(drafter):
    tensors = serving_tensors(drafter)
    assert fingerprint(tensors, torch.bfloat16) != fingerprint(tensors)


def test_every_single_element_counts(drafter):
    whole = fingerprint(serving_tensors(drafter, torch.bfloat16))
    for name in serving_tensors(drafter):
        changed = serving_tensors(drafter, torch.bfloat16)
        bits = changed[name].view(torch.int16).reshape(-1)
        bits[-1] ^= 1
        assert fingerprint(changed) != whole, name


def test_swapped_tensors_and_swapped_columns_show(drafter):
    tensors = serving_tensors(drafter)
    whole = fingerprint(tensors)
    left, right = "layers.0.mlp.down_proj.weight", "layers.0.mlp.gate_proj.weight"
    assert fingerprint({**tensors, left: tensors[right].T, right: tensors[left].T}) != whole
    assert fingerprint({**tensors, "fc.weight": tensors["fc.weight"].flip(1)}) != whole


def test_large_tensors_are_summed_in_parts(monkeypatch):
    import verl_tlt.drafter.digest as digest

    tensor = {"fc.weight": torch.randn(37, 11)}
    whole = fingerprint(tensor)
    monkeypatch.setattr(digest, "_CHUNK", 20)
    assert fingerprint(tensor) == whole


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="float64"):
        fingerprint({"fc.weight": torch.zeros(2, dtype=torch.float64)})
