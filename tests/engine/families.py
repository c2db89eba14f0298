"""Tiny random policies of the families that drafters are built for, but for Llama, Qwen2 and Qwen3 (`tiny_engine`).

All have one shape, and their next token depends mostly on the present one, so that the hand-made drafter of
`tiny_engine` guesses it often.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_tlt.drafter.capture import find_decoder

SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
RECURRENT = {
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32",
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTURE = {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 64, "intermediate_size": None}
VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "patch_size": 14,
}  # fmt: skip
IMAGE = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
INTERLEAVED = {**MROPE, "mrope_interleaved": True}

# By family: (its class in transformers less "Config" or "ForCausalLM", what its config says beyond SHAPE).
TEXT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "glm": ("Glm", {}),
    "phi3": ("Phi3", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {}),
    "qwen3_next": (
        "Qwen3Next",
        {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0, 1, 2]},
    ),
    "qwen3_5_text": ("Qwen3_5", RECURRENT),
}
# By family: (class less "Config" or "ForConditionalGeneration", what its language model says beyond SHAPE). Without
# architectures there, vLLM's CPU platform does not start a Qwen3-VL.
NESTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}),
    "qwen3_5": ("Qwen3_5", RECURRENT),
    "qwen3_5_moe": ("Qwen3_5Moe", MIXTURE),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": INTERLEAVED, "architectures": ["Qwen3ForCausalLM"]}),
}  # fmt: skip

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")
"""Those with recurrent states."""


def build_family(path: Path, family: str, vocab: int = 512, state: float = 1.0) -> Any:
    """The family's tiny model, frozen, and saved to `path`; `state`: how much recurrent states count, if it has any."""
    import transformers

    torch.manual_seed(0)
    name, more = {**TEXT, **NESTED}[family]
    config = getattr(transformers, f"{name}{'Text' * family.endswith('_text')}Config")
    shape = {key: value for key, value in {**SHAPE, "vocab_size": vocab, **more}.items() if value is not None}
    if family in TEXT:
        model = getattr(transformers, f"{name}ForCausalLM")(config(**shape))
    else:
        whole = config(text_config=shape, vision_config=VISION, dtype="float32", **IMAGE)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(whole)
    model = model.float().eval().requires_grad_(False)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape))
        model.get_output_embeddings().weight.mul_(10.0)
        find_decoder(model, family).norm.weight.uniform_(0.5, 1.5)
        for key, weight in model.named_parameters():  # how much the context counts beside the present token
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(2.0)
            elif key.endswith("linear_attn.out_proj.weight"):
                weight.mul_(state)
            if family in HYBRID:  # vLLM computes these in 16 bits: its log-probabilities are compared with float32's
                weight.copy_(weight.bfloat16())
    model.save_pretrained(path)
    if family in NESTED:
        (path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return model
