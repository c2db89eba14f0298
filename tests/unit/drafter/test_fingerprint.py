"""The fingerprint: the same for the trainer's tensors and vLLM's, another for any other weights; names of tensors."""

import pytest
import torch

from verl_tlt.drafter import digest
from verl_tlt.drafter.checkpoint import serving_tensors
from verl_tlt.drafter.digest import combined, fingerprint, own_shards, partial_sums
from verl_tlt.drafter.tensor_file import stacked


def rank_of(tensors, rank, size, head=8):
    """One tensor-parallel rank's parameters as vLLM lays them out; KV heads are repeated where there are too few."""
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    own = dict(tensors)

    def rows(tensor, height):
        height = max(height, tensor.shape[0] // size)
        copies = size * height // tensor.shape[0]
        return tensor[rank // copies * height :][:height]

    query, key, value = (own.pop(f"{attention}{x}_proj.weight") for x in "qkv")
    gate, up = (own.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up"))
    live = {
        f"{attention}qkv_proj.weight": torch.cat([rows(query, 0), rows(key, head), rows(value, head)]),
        f"{mlp}gate_up_proj.weight": torch.cat([rows(gate, 0), rows(up, 0)]),
        f"{attention}o_proj.weight": own.pop(f"{attention}o_proj.weight").chunk(size, dim=1)[rank],
        f"{mlp}down_proj.weight": own.pop(f"{mlp}down_proj.weight").chunk(size, dim=1)[rank],
        "fc.weight": own.pop("fc.weight").chunk(size)[rank],
    }
    return {f"model.{name}": tensor for name, tensor in {**own, **live}.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_on_both_sides(drafter, dtype):
    tensors = serving_tensors(drafter, dtype)
    policys = {
        "draft_id_to_target_id": torch.zeros(48, dtype=torch.int64),
        "model.embed_tokens.weight": torch.rand(48, 32),
        "lm_head.weight": torch.rand(48, 32),
    }  # all that `Eagle3LlamaForCausalLM.named_parameters()` has besides
    assert fingerprint(policys | rank_of(tensors, 0, 1)) == fingerprint(tensors)
    assert (fingerprint(tensors) == fingerprint(serving_tensors(drafter))) == (dtype == torch.float32)


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
    tensor = {"fc.weight": torch.randn(37, 11)}
    whole = fingerprint(tensor)
    monkeypatch.setattr(digest, "_CHUNK", 20)
    assert fingerprint(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int64])
def test_a_buffer_of_any_width_counts(dtype):
    one, other = (fingerprint({"scale": torch.tensor(values).to(dtype)}) for values in ([1, 0], [1, 1]))
    assert one != other


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_answer_together_for_the_whole(drafter, size):
    tensors = serving_tensors(drafter, torch.bfloat16)
    key_rows = tensors["layers.0.self_attn.k_proj.weight"].shape[0]
    ranks = [rank_of(tensors, rank, size, head=key_rows // 2) for rank in range(size)]

    def sums():
        return combined([partial_sums(own_shards(live, tensors, rank, size)) for rank, live in enumerate(ranks)])

    assert sums() == fingerprint(tensors)
    last = ranks[-1]["model.layers.0.mlp.down_proj.weight"]
    ranks[-1]["model.layers.0.mlp.down_proj.weight"] = last.flip(1)
    assert sums() != fingerprint(tensors)


@pytest.mark.parametrize(
    ("saved", "lives"),
    [
        ("fc.weight", "model.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("midlayer.self_attn.v_proj.bias", "model.layers.0.self_attn.qkv_proj.bias"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("midlayer.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight"),
        ("mtp.fc.weight", "model.fc.weight"),
        ("mtp.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.36.input_proj.weight"),
        ("model.mtp_layers.0.self_attn.q_proj.bias", "model.mtp_layers.36.mtp_block.self_attn.qkv_proj.bias"),
    ],
)
def test_a_saved_tensor_and_the_parameter_that_holds_it_have_one_name(saved, lives):
    assert stacked(saved) == stacked(lives)
