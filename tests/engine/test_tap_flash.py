"""The tap under an actor's default attention, flash_attention_2, whose two kernels have stand-ins.

Everything around the kernels is transformers' and verl's own: packing by position ids, unpadding by a mask.
"""

import gc
import itertools

import pytest
import torch
from actor import build_actor, check_log_probs, check_states, free_port, infer, make_rows, plain_policy
from transformers import modeling_flash_attention_utils
from transformers.modeling_utils import PreTrainedModel

pytestmark = pytest.mark.engine

TOLERANCE = dict(rtol=2**-8, atol=1e-3)  # as in test_tap.py
LENGTHS = [(4, 20), (6, 30), (3, 12), (5, 1)]


class Kernels:
    """`flash_attn_func` and `flash_attn_varlen_func` by torch, with a note of each call."""

    def __init__(self):
        self.called = []

    def dense(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_others):
        """Queries, keys and values [B, S, heads, D]."""
        self.called.append("dense")
        return attend(q, k, v, softmax_scale, causal)

    def varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, **_others,
    ):  # fmt: skip
        """Sequences [T, heads, D] one after another, each from one cumulative length to the next."""
        self.called.append("varlen")
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q[-1] == len(q)
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        parts = ([x[None, a:b] for x in (q, k, v)] for a, b in itertools.pairwise(cu_seqlens_q.tolist()))
        return torch.cat([attend(*part, softmax_scale, causal)[0] for part in parts])


def attend(q, k, v, scale, causal):
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture
def kernels(monkeypatch):
    """As if flash-attn were installed, and would run here."""
    kernels, fa = Kernels(), modeling_flash_attention_utils
    found = (kernels.dense, kernels.varlen, None, fa._pad_input, fa._unpad_input)
    monkeypatch.setattr(fa, "_lazy_imports", lambda *_args, **_kwargs: found)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(fa, name, None)  # what it keeps between calls
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_args, **_kwargs: True)
    return kernels


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_states_and_log_probs_are_the_policys(kernels, packed):
    policy, rows = plain_policy(), make_rows(LENGTHS)
    flash = {"override_config": {"attn_implementation": "flash_attention_2"}}
    actor = build_actor(remove_padding=packed, port=free_port(), model=flash)
    try:
        taken, log_probs = infer(actor, rows)
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()
    assert set(kernels.called) == {"varlen"}, "the actor attended in another way"
    check_states(taken, rows, policy, **TOLERANCE)
    lengths = [len(tokens) for tokens, _ in rows]
    for (tokens, _), got in zip(rows, log_probs.split(lengths), strict=True):
        check_log_probs(got, tokens, policy)
