"""One tensor, three names."""

import pytest

from verl_tlt.drafter.names import live, plain, stacked

LAYER = "layers.0."


@pytest.mark.parametrize("theirs", ["layers.0.", "midlayer.", "model.layers.0."])
@pytest.mark.parametrize(
    ("part", "fused"),
    [
        ("self_attn.q_proj.weight", "self_attn.qkv_proj.weight"),
        ("self_attn.v_proj.bias", "self_attn.qkv_proj.bias"),
        ("mlp.up_proj.weight", "mlp.gate_up_proj.weight"),
        ("mlp.down_proj.weight", "mlp.down_proj.weight"),
        ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ],
)
def test_all_names_of_a_layers_tensor_meet(theirs, part, fused):
    assert plain(theirs + part) == LAYER + part
    assert stacked(theirs + part) == LAYER + fused
    assert live(theirs + part) == f"model.{LAYER}{fused}" == live(stacked(theirs + part))


@pytest.mark.parametrize(
    ("name", "lives"), [("fc.weight", "model.fc.weight"), ("norm.weight", "model.norm.weight"), ("lm_head.weight",) * 2]
)
def test_outside_the_layer_only_the_head_stands_beside_the_model(name, lives):
    assert live(name) == live(lives) == lives and plain(lives) == name
