"""A policy's own head for multi-token prediction (MTP) as a drafter that is trained like an EAGLE-3 head.

vLLM drafts with both alike: one pass over the known tokens, then one token at a time, each fed with the state that the
pass before returned. So the recurrence, its loss and its counts are those of `speculators` for EAGLE-3, with other
modules: the head reads one state, the policy's last; it is a decoder layer of the policy's own family; and the state
that it hands on is normed.

Sources: vLLM's `qwen3_5_mtp.py`, `mimo_mtp.py`, and `llm_base_proposer.py` (`propose`).
"""

from typing import Any

import torch
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from torch.nn.attention.flex_attention import create_mask
from transformers import PretrainedConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from verl_tlt.drafter.head_config import layer_fields, library_fields
from verl_tlt.drafter.mtp_tensors import MIMO, QWEN3_5, mtp_layout
from verl_tlt.drafter.policy import MTP, PolicyShape


def mtp_config(shape: PolicyShape) -> MTPSpeculatorConfig:
    """The config of a policy's MTP head, all from the policy's own config; a `DrafterError` where there is no head."""
    layout = mtp_layout(shape)
    fields = {**layer_fields(shape), "layer_types": ["full_attention"], "rope_parameters": dict(shape.rope)}
    layer: PretrainedConfig
    if layout.experts:
        fields |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        fields |= {"moe_intermediate_size": shape.expert_width, "shared_expert_intermediate_size": shape.shared_width}
        layer = _qwen3_5_moe().Qwen3_5MoeTextConfig(**fields)
    else:
        layer = _qwen3_5().Qwen3_5TextConfig(**fields) if layout.gated else Qwen2Config(**fields)
    # `norm_output`: what a pass returns is what the head reads, as `Eagle3DraftModel.forward` asks.
    return MTPSpeculatorConfig(
        transformer_layer_config=layer, norm_output=True, speculators_config=library_fields(MTP, shape)
    )


def _qwen3_5() -> Any:  # older releases of transformers lack it
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


def _qwen3_5_moe() -> Any:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    return modeling_qwen3_5_moe


class MTPDrafter(Eagle3DraftModel):
    """An MTP head with the policy's embedding, output head and final norm; parameters have the checkpoint's names."""

    config_class = MTPSpeculatorConfig

    def __init__(self, config: MTPSpeculatorConfig) -> None:
        """Do what `Eagle3DraftModel.__init__` does, with other modules."""
        super(Eagle3DraftModel, self).__init__(config=config)
        layer: Any = config.transformer_layer_config
        with torch.device("meta"):
            self._init_vocab(config)
        self._attn_impl = layer._attn_implementation
        self._create_mask_fn = create_float_mask if self._attn_impl == "eager" else create_mask
        self.uses_full_attn = True
        self.uses_sliding_window_attn = False
        self.sliding_window_indices: list[int] = []
        self.input_norm = self.fc_norm = None
        self.verifier_norm = LlamaRMSNorm(self.hidden_size, eps=layer.rms_norm_eps).requires_grad_(False)
        head: Qwen35Head | MiMoHead
        before_head: torch.nn.Module
        after_head: torch.nn.Module
        if layer.model_type.startswith("qwen3_5"):
            head = Qwen35Head(layer)
            before_head = self.verifier_norm  # the head reads the state after the policy's final norm
            after_head = head.norm
            self.rotary_emb = _qwen3_5().Qwen3_5TextRotaryEmbedding(layer)
            self.add_module(QWEN3_5.prefix.rstrip("."), head)
        else:
            head = MiMoHead(layer)
            before_head = torch.nn.Identity()  # the head reads the state before the policy's final norm
            after_head = head.final_layernorm
            self.rotary_emb = Qwen2RotaryEmbedding(layer)
            first, second = MIMO.prefix.rstrip(".").split(".")
            self.add_module(first, torch.nn.ModuleDict({second: torch.nn.ModuleList([head])}))
        # The recurrence's names for these modules, kept out of `named_parameters`. `norm` comes before the policy's
        # head, and before the next pass.
        self.__dict__ |= {"fc": before_head, "layers": [head], "norm": after_head}

    @property
    def target_layer_ids(self) -> list[int]:
        return []


class Qwen35Head(torch.nn.Module):
    """Qwen3.5's MTP head: embedding before hidden state, gated attention, norms that multiply by weight plus one.

    Experts are trained with all else, since they are most of what such a head can learn with.
    """

    def __init__(self, layer: PretrainedConfig) -> None:
        super().__init__()
        modules = _qwen3_5()
        hidden = layer.hidden_size
        eps = layer.rms_norm_eps
        self.pre_fc_norm_embedding = modules.Qwen3_5RMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = modules.Qwen3_5RMSNorm(hidden, eps=eps)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        if layer.model_type == "qwen3_5_moe_text":
            layer._experts_implementation = "grouped_mm"  # each expert in turn would make gradients of all for each
            block = _qwen3_5_moe().Qwen3_5MoeDecoderLayer(layer, 0)
        else:
            block = modules.Qwen3_5DecoderLayer(layer, 0)
        self.layers = torch.nn.ModuleList([block])
        self.norm = modules.Qwen3_5RMSNorm(hidden, eps=eps)

    def forward(self, hidden_states: torch.Tensor, *, position_ids: torch.Tensor, **attention: Any) -> torch.Tensor:
        """`hidden_states` [1, S, 2H]: the token's embedding, and the state of the policy or of the pass before."""
        token, state = hidden_states.chunk(2, dim=-1)
        both = torch.cat([self.pre_fc_norm_embedding(token), self.pre_fc_norm_hidden(state)], dim=-1)
        return self.layers[0](self.fc(both), position_ids=position_ids, **attention)


class MiMoHead(Qwen2DecoderLayer):
    """MiMo's MTP head: hidden state before embedding; the embedding of what follows the first token counts as zero."""

    def __init__(self, layer: Qwen2Config) -> None:
        super().__init__(layer, 0)
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(hidden, eps=eps)
        self.hidden_layernorm = Qwen2RMSNorm(hidden, eps=eps)
        self.input_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = Qwen2RMSNorm(hidden, eps=eps)

    def forward(self, hidden_states: torch.Tensor, *, position_ids: torch.Tensor, **attention: Any) -> torch.Tensor:
        """As `Qwen35Head.forward`; `position_ids` [1, S] count from the beginning of the whole sequence."""
        token, state = hidden_states.chunk(2, dim=-1)
        token = token.masked_fill((position_ids == 0)[..., None], 0.0)
        both = torch.cat([self.hidden_layernorm(state), self.token_layernorm(token)], dim=-1)
        return super().forward(self.input_proj(both), position_ids=position_ids, **attention)
