from typing import NamedTuple

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.toy.tokenizer import save_tokenizer
from demo.toy.widen import widen


class Pair(NamedTuple):
    small: Qwen3ForCausalLM
    wide: Qwen3ForCausalLM
    aux_layers: tuple


@pytest.fixture
def pair(tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "small")
    save_tokenizer(tmp_path / "small")
    made = widen(tmp_path / "small", tmp_path / "wide", mlp_width=160)
    small, wide = (Qwen3ForCausalLM.from_pretrained(tmp_path / name) for name in ("small", "wide"))
    assert made.parameters == wide.num_parameters() > 2 * small.num_parameters()
    return Pair(small, wide, made.aux_layers)


@pytest.fixture
def tokens():
    return torch.randint(5, 50, (4, 40), generator=torch.Generator().manual_seed(1))  # [B, T]


def added(pair):
    """The wide policy's weights with a mask of the numbers that the small one lacks."""
    small = pair.small.state_dict()
    for name, weight in pair.wide.named_parameters():
        mask = torch.ones_like(weight, dtype=torch.bool)
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) % 2 == 0:
            parts[2] = str(int(parts[2]) // 2)
        if parts[1] != "layers" or int(name.split(".")[2]) % 2 == 0:
            mask[tuple(slice(n) for n in small[".".join(parts)].shape)] = False
        yield name, weight, mask


def test_outputs_are_the_same(pair, tokens):
    for dtype in (torch.float32, torch.bfloat16):
        small, wide = pair.small.to(dtype), pair.wide.to(dtype)
        with torch.no_grad():
            assert (small(tokens).logits - wide(tokens).logits).abs().max() == 0.0


def test_the_tapped_inputs_are_outputs_of_real_layers(pair, tokens):
    with torch.no_grad():
        small = pair.small(tokens, output_hidden_states=True).hidden_states
        wide = pair.wide(tokens, output_hidden_states=True).hidden_states
    taps = [wide[i] for i in pair.aux_layers]
    assert torch.equal(taps[0], small[2]) and torch.equal(taps[1], small[3])
    assert not torch.equal(taps[2], taps[1])
    assert all(0 < i < pair.wide.config.num_hidden_layers for i in pair.aux_layers)


def test_the_optimizer_leaves_every_added_number_at_zero(pair, tokens):
    before = {name: weight.detach().clone() for name, weight in pair.wide.named_parameters()}
    optimizer = torch.optim.AdamW(pair.wide.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        pair.wide(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(pair.wide.parameters(), 1.0)
        optimizer.step()
    for name, weight, mask in added(pair):
        assert (weight[mask] == 0).all(), name
        assert mask.all() or not torch.equal(weight[~mask], before[name][~mask]), name
