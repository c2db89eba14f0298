"""Make an EAGLE-3 drafter that fits a policy.

The drafter is one layer of the Llama architecture whatever the policy's family, because every vLLM release serves such
a head; heads, head size and RoPE are the policy's, so that both share one KV-cache layout. Model, loss and file format
are those of `speculators.models.eagle3`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter.head_config import config_of, layer_fields, library_fields
from verl_tlt.drafter.policy import (
    MTP,
    PolicyLike,
    aux_layers_for,
    check_aux_layers,
    drafter_rope,
    policy_shape,
    unsupported,
)
from verl_tlt.errors import DrafterError

BY_DOCUMENT = "tlt_by_document"
"""Attention over a packed row, one document at a time: for transformers' `_attn_implementation`, on a CPU.

A dense mask computes all S x (passes x S) scores; with it a small model's step takes 1.5 times as long there.
"""
_SELF = 8.0
"""A new drafter's keys and queries are initialised so that a position's attention logit for itself is about this."""
_NOISE = 0.3
"""Standard deviation of a new drafter's values and outputs beside the token's embedding, relative to their inputs."""

if TYPE_CHECKING:
    import numpy as np
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.mtp.config import MTPSpeculatorConfig


def default_attention(device: torch.device | str) -> str:
    """The attention for a device: on CUDA one kernel over the dense mask, elsewhere one document after the other."""
    return "sdpa" if torch.device(device).type == "cuda" else BY_DOCUMENT


def drafter_config(
    policy: PolicyLike,
    *,
    aux_layers: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    max_position_embeddings: int | None = None,
    draft_vocab_size: int | None = None,
) -> Eagle3SpeculatorConfig:
    """The config of a drafter for a policy, one of `policy.SUPPORTED`; an argument that is None is the policy's.

    `aux_layers`: layer inputs to read; None: `aux_layers_for`. `max_position_embeddings`: longest context to draft at;
    None: the policy's and `LONGEST_DRAFT` more, as vLLM before 0.28 drafts nothing for a batch in which a request comes
    within K of it. A `DrafterError` for an unsupported policy, or aux layers it does not have.
    """
    shape = policy_shape(policy)
    if why := unsupported(shape.model_type, shape.architectures, shape.latent):
        raise DrafterError(f"{shape.source}: model_type {shape.model_type!r} is not supported; {why}.")
    layers = aux_layers_for(shape.num_layers) if aux_layers is None else aux_layers
    check_aux_layers(layers, shape.num_layers, "aux_layers")
    layer = layer_fields(shape)
    layer["intermediate_size"] = intermediate_size or shape.intermediate_size
    layer["max_position_embeddings"] = max_position_embeddings or layer["max_position_embeddings"]
    layer["hidden_act"] = "silu"  # the only one that vLLM's head has
    rope = drafter_rope(shape.rope)
    if "long_factor" in rope:  # transformers chooses it by the positions of a batch, vLLM by the longest it may serve
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    layer["rope_parameters"] = rope
    fields = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        "draft_vocab_size": draft_vocab_size or shape.vocab_size,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "speculators_config": library_fields("eagle3", shape),
    }
    return config_of(fields)


def build_drafter(
    policy: PolicyLike,
    *,
    aux_layers: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
    attention: str | None = None,
    device: torch.device | str = "cpu",
    max_position_embeddings: int | None = None,
    draft_ids: torch.Tensor | int | None = None,
) -> Eagle3DraftModel:
    """A drafter with random trainable weights, float32, the same for the same seed on every machine.

    Embedding and head are NaN until `refresh_verifier_weights` has copied the policy's. Weights are made on the CPU and
    leave the process's random state as it was. The shape, and what is refused, is `drafter_config`'s.

    `attention`: "tlt_by_document", "sdpa" or "eager"; None: `default_attention(device)`. `draft_ids`: int64 [DV],
    ascending target ids the drafter may propose; None: all of them; a number: that many, chosen later
    (`choose_tokens`); until then the first ids stand in, and the head's rows are zeros.
    """
    ids = torch.arange(draft_ids) if isinstance(draft_ids, int) else draft_ids
    config = drafter_config(
        policy,
        aux_layers=aux_layers,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        draft_vocab_size=None if ids is None else len(ids),
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = instantiate(config, attention or default_attention(device))
        begin_at_the_token(model)
    if ids is not None:
        choose_tokens(model, ids)
    if isinstance(draft_ids, int):  # a file of it has rows of a head, as vLLM asks for
        with torch.no_grad():
            make_room(model.lm_head).zero_()
    return model.to(device)


@torch.no_grad()
def begin_at_the_token(model: Eagle3DraftModel) -> None:
    """Initialise half of a new layer's heads so that they add their position's token embedding to the residual stream.

    Without that, the residual stream holds the policy's state alone (benchmarks/results/drafter.md#finished-studies).
    """
    attention = model.layers[0].self_attn
    hidden = model.hidden_size
    size = attention.head_dim
    key_rows = len(attention.k_proj.weight)
    query_rows = len(attention.q_proj.weight)
    groups = query_rows // key_rows  # query heads that share a key head
    rows = size * math.ceil(key_rows // size / 2)  # of half of the key heads
    key = attention.k_proj.weight[:rows]
    value = attention.v_proj.weight[:rows]
    query = attention.q_proj.weight[: rows * groups]
    out = attention.o_proj.weight[:, : rows * groups]

    def for_queries(keys: torch.Tensor) -> torch.Tensor:  # [rows, X] of key heads to [rows * groups, X] of query heads
        return keys.view(-1, size, keys.shape[1]).repeat_interleave(groups, dim=0).flatten(0, 1)

    key.normal_(std=(_SELF / (size**0.5 * 2 * hidden)) ** 0.5)  # inputs are normed
    query.copy_(for_queries(key))
    value.normal_(std=_NOISE / (2 * hidden) ** 0.5)
    out.normal_(std=_NOISE / out.shape[1] ** 0.5)
    rotation = torch.nn.init.orthogonal_(torch.empty(rows, hidden))  # out inverts what value does
    value[:, :hidden] += rotation
    out += for_queries(rotation).T / groups


def choose_tokens(model: Eagle3DraftModel, draft_ids: torch.Tensor) -> bool:
    """Draft these tokens: int64 [DV], ascending target ids; returns whether others were drafted before."""
    ids = draft_ids.to(torch.int64).cpu()
    vocab = model.verifier_vocab_size
    size = model.draft_vocab_size
    if ids.shape != (size,) or bool((ids.diff() <= 0).any()) or bool(ids[0] < 0 or ids[-1] >= vocab):
        raise DrafterError(f"draft_ids must be {size} ascending distinct token ids within 0..{vocab - 1}.")
    if not model.use_draft_vocab:
        return False
    t2d = torch.zeros(vocab, dtype=torch.bool)  # [V] whether a token is kept
    t2d[ids] = True
    changed = not torch.equal(t2d, model.t2d.cpu())
    model.load_vocab_mappings(t2d, ids - torch.arange(size))  # [DV] target id minus draft id
    return changed


def has_chosen_tokens(model: Eagle3DraftModel) -> bool:
    """Whether a drafter's tokens are final: it has its own head, a whole vocabulary, or other ids than the first."""
    return has_own_head(model) or not model.use_draft_vocab or bool(model.d2t.any())


def instantiate(config: Eagle3SpeculatorConfig | MTPSpeculatorConfig, attention: str) -> Eagle3DraftModel:
    """The model of `config` in float32 on the current device; `config.own_head`: the drafter's head is its own.

    Embedding and heads are NaN and take no memory until `make_room`: building or exporting needs none of the gigabytes.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(BY_DOCUMENT, attend_by_document)
    config.transformer_layer_config._attn_implementation = attention
    model = _model_class(config.speculators_model_type)(config).float()
    # Where CUDA is, `speculators` compiles the forward: anew for other row counts and for scoring, for as long as that
    # takes, while a stop waits. Its time is in a few large matrix products, for which there is nothing to compile.
    model.forward = MethodType(inspect.unwrap(type(model).forward), model)
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight = torch.nn.Parameter(torch.full((1, 1), torch.nan).expand(module.weight.shape), False)
    if not has_own_head(model):
        model.verifier_lm_head.weight = model.lm_head.weight  # one copy of the policy's head serves as both
    return model


@cache
def _model_class(kind: str) -> type[Eagle3DraftModel]:
    if kind == MTP:
        from verl_tlt.drafter.mtp import MTPDrafter

        return MTPDrafter
    from speculators.models.eagle3 import Eagle3DraftModel

    class Drafter(Eagle3DraftModel):
        """`Eagle3DraftModel` without its filling of embedding and two heads, with random numbers and then with NaN.

        What reads the policy's states has the policy's width (vLLM `llama_eagle3.py`); speculators gives it the head's.
        """

        def __init__(self, config: Eagle3SpeculatorConfig) -> None:
            super().__init__(config)
            width = policy_width(self)
            if width == self.hidden_size:
                return
            layers = len(self.target_layer_ids)
            norm = partial(self._model_definitions.norm_class, eps=config.transformer_layer_config.rms_norm_eps)
            self.fc = torch.nn.Linear(layers * width, self.hidden_size, bias=False)
            self.input_norm = norm(layers * width) if config.norm_before_fc else None
            self.fc_norm = torch.nn.ModuleList(norm(width) for _ in range(layers)) if config.fc_norm else None
            self.verifier_norm = norm(width).requires_grad_(False)
            with torch.device("meta"):
                self.verifier_lm_head = torch.nn.Linear(width, self.draft_vocab_size, bias=False)

        def _init_vocab(self, config: Eagle3SpeculatorConfig) -> None:
            with torch.device("meta"):
                super()._init_vocab(config)
            if self.use_draft_vocab:
                self.t2d = torch.zeros(self.verifier_vocab_size, dtype=torch.bool)
                self.d2t = torch.zeros(self.draft_vocab_size, dtype=torch.int64)

    return Drafter


def make_room(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a drafter's embedding or head, given memory where it had none (`instantiate`)."""
    weight = module.get_parameter("weight")
    if 0 in weight.stride():
        weight.data = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return weight


def has_own_head(model: Eagle3DraftModel) -> bool:
    """Whether a drafter has a head of its own, as SafeAILab's and SpecForge's have, and does not use the policy's."""
    return bool(getattr(model.config, "own_head", False))


def policy_width(model: Eagle3DraftModel) -> int:
    """Hidden size of the policy; the head's own, `model.hidden_size`, may differ (SafeAILab's for Llama-3.3-70B)."""
    return getattr(model.config, "target_hidden_size", None) or model.hidden_size


def has_own_embedding(model: Eagle3DraftModel) -> bool:
    """Whether a drafter has an embedding of its own: the policy's does not fit a head of another width."""
    return policy_width(model) != model.hidden_size


def own_frozen(model: Eagle3DraftModel) -> set[str]:
    """Names of the weights that are neither trained nor the policy's: a drafter's own embedding and output head."""
    parts = {"embed_tokens.weight": has_own_embedding(model), "lm_head.weight": has_own_head(model)}
    return {name for name, own in parts.items() if own}


def halve_frozen(model: Eagle3DraftModel) -> None:
    """Store the policy's weights in 16 bits, as an accelerator computes; what is the drafter's own stays as it is."""
    own = own_frozen(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in own:
            weight = parameter.data
            empty = 0 in weight.stride()  # without memory of its own (`instantiate`)
            parameter.data = weight[:1, :1].bfloat16().expand(weight.shape) if empty else weight.bfloat16()


def most_frequent(counts: torch.Tensor | np.ndarray, size: int) -> torch.Tensor:
    """int64 [size]: the token ids of the largest of `counts` (int64 [V]), ascending; ties go to the lower id."""
    order = torch.sort(torch.as_tensor(counts), descending=True, stable=True).indices  # [V]
    return order[:size].sort().values


def attend_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Softmax attention under the mask of `speculators` (`create_combined_mask_mod`), as transformers calls it.

    `query` is [1, heads, S, head_dim], `key` and `value` [1, kv_heads, P * S, head_dim] in pass P of a training-time
    test. `attention_mask`, bool [1, 1, S, P * S], is causal within documents in the first S columns, and the diagonal
    of each further S; padding attends to itself alone. Returns [1, S, heads, head_dim], and no weights.
    """
    heads, rows, width = query.shape[1:]
    kv = key.shape[1]
    passes = key.shape[2] // rows
    groups = heads // kv  # query heads that share keys and values, which are not repeated for each
    q = (query[0] * (width**-0.5 if scaling is None else scaling)).view(kv, groups, rows, width)
    k = key[0].view(kv, 1, passes, rows, width)
    v = value[0].view(kv, 1, passes, rows, width)
    # [kv, G, S, P-1]: of the later passes each position sees its own keys only.
    later_scores = (q[:, :, None] * k[:, :, 1:]).sum(-1).transpose(2, 3)
    parts = []
    for begin, end in _documents(attention_mask[0, 0, :, :rows]):
        span = slice(begin, end)
        length = end - begin
        scores = (q[:, :, span].flatten(1, 2) @ k[:, 0, 0, span].transpose(1, 2)).view(kv, groups, length, length)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        weights = torch.cat([scores, later_scores[:, :, span]], dim=-1).softmax(-1)
        first_weights = weights[..., :length]
        later_weights = weights[..., length:]
        first = (first_weights.flatten(1, 2) @ v[:, 0, 0, span]).view(kv, groups, length, width)
        later = (later_weights.transpose(2, 3)[..., None] * v[:, :, 1:, span]).sum(2)
        parts.append(first + later)
    return torch.cat(parts, dim=2).flatten(0, 1).transpose(0, 1)[None], None


def _documents(mask: torch.Tensor) -> list[tuple[int, int]]:
    """(begin, end) of the documents in a bool [S, S] mask."""
    index = torch.arange(len(mask), device=mask.device)
    starts = mask.int().argmax(dim=1)  # [S] the first position that each one attends to
    if not torch.equal(mask.sum(dim=1), index - starts + 1):
        raise ValueError(f"Attention {BY_DOCUMENT!r} needs a mask that is causal within whole documents.")
    return list(itertools.pairwise([*sorted(set(starts.tolist())), len(mask)]))
