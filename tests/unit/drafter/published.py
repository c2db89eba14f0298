"""Facts of policies' config.json as their makers published them, in the spelling of each, at sizes that a test runs.

Written down from the published files, not copied: what shapes a drafter, what is left out, and where fields stand. Head
sizes and RoPE are the real ones; layers, widths and vocabularies are small.
"""

SIZES = dict(intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4, vocab_size=200)
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
HYBRID = dict(
    full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[])
LLAMA3 = dict(high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3")
VISION = dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=2, patch_size=14)


def text(model_type, architecture, head, *, context=4096, width=None, **more):
    """A language model's fields at the top."""
    return {
        **SIZES, **TOKENS, "model_type": model_type, "architectures": [architecture], "hidden_size": width or 2 * head,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


LONGROPE = dict(
    original_max_position_embeddings=4096, sliding_window=262144, rope_theta=10000.0,
    rope_scaling=dict(type="longrope", long_factor=[1.5] * 48, short_factor=[1.0] * 48),
)  # fmt: skip
REMOTE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
QWEN3_5_ROPE = dict(
    mrope_interleaved=True, mrope_section=[11, 11, 10], rope_theta=10000000, rope_type="default",
    partial_rotary_factor=0.25,
)  # fmt: skip

PUBLISHED = {
    "Llama-3.2-1B": text(
        "llama", "LlamaForCausalLM", 64, context=131072, head_dim=64, rope_theta=500000.0,
        rope_scaling={**LLAMA3, "factor": 32.0}, tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": text(
        "mistral", "MistralForCausalLM", 128, rope_theta=1e6, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "AFM-4.5B": text(
        "arcee", "ArceeForCausalLM", 128, context=65536, head_dim=128, hidden_act="relu2", rope_theta=10000.0,
        rope_scaling=dict(
            rope_type="yarn", factor=20.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
            original_max_position_embeddings=4096,
        ),
    ),
    "Apertus-8B": text(
        "apertus", "ApertusForCausalLM", 128, context=65536, hidden_act="xielu", rope_theta=12000000,
        rope_scaling={**LLAMA3, "type": "llama3", "factor": 8.0}, tie_word_embeddings=False,
    ),
    "Qwen2.5-7B": text(
        "qwen2", "Qwen2ForCausalLM", 128, context=32768, max_window_layers=28, rope_theta=1e6, sliding_window=131072,
        use_sliding_window=False, tie_word_embeddings=False,
    ),
    "Qwen3-8B": text(
        "qwen3", "Qwen3ForCausalLM", 128, head_dim=128, width=64, rope_theta=1000000, rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": text(
        "qwen3_moe", "Qwen3MoeForCausalLM", 128, head_dim=128, width=64, rope_theta=1e6, rope_scaling=None, **EXPERTS,
        tie_word_embeddings=False,
    ),
    "glm-4-9b-chat-hf": text(
        "glm", "GlmForCausalLM", 128, context=131072, head_dim=128, partial_rotary_factor=0.5, attention_bias=True,
        rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "Phi-3-mini-128k": text(
        "phi3", "Phi3ForCausalLM", 96, context=131072, **LONGROPE, tie_word_embeddings=False, auto_map=REMOTE
    ),
    "Phi-4-mini": text(
        "phi3", "Phi3ForCausalLM", 128, context=131072, **LONGROPE, partial_rotary_factor=0.75,
        tie_word_embeddings=True, auto_map=REMOTE,
    ),
    "ERNIE-4.5-0.3B": text(  # tied, and silent about it: the default of its class
        "ernie4_5", "Ernie4_5ForCausalLM", 128, context=131072, head_dim=128, width=64, rope_theta=500000.0,
        use_bias=False,
    ),
    "Qwen2.5-VL-7B": text(  # the language model's fields at the top
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", 128, rope_theta=1e6, sliding_window=32768,
        rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]), use_sliding_window=False,
        tie_word_embeddings=False,
        image_token_id=190, video_token_id=191, vision_start_token_id=192, vision_end_token_id=193,
        vision_config={**VISION, "out_hidden_size": 256, "fullatt_block_indexes": [1], "window_size": 112},
    ),
    "Qwen3-VL-8B": {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": False,
        "image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193,
        "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        "text_config": {
            **text("qwen3_vl_text", "", 128, head_dim=128, width=64, rope_theta=5000000),
            "rope_scaling": dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
        },
    },
    "Qwen3-Next-80B-A3B": text(
        "qwen3_next", "Qwen3NextForCausalLM", 256, width=64, head_dim=256, partial_rotary_factor=0.25,
        rope_theta=10000000, rope_scaling=None, shared_expert_intermediate_size=32, **HYBRID, **EXPERTS,
        tie_word_embeddings=False,
    ),
    "Qwen3.5-4B": {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True,
        "image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193,
        "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": []},
        "text_config": {
            **text("qwen3_5_text", "", 256, width=64, head_dim=256, tie_word_embeddings=True), **HYBRID,
            "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
            "rope_parameters": QWEN3_5_ROPE,
        },
    },
    "Qwen3.5-35B-A3B": {  # experts alone, so no `intermediate_size`
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193,
        "tie_word_embeddings": False,
        "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": []},
        "text_config": {
            **{k: v for k, v in text("qwen3_5_moe_text", "", 256).items() if k != "intermediate_size"},
            **HYBRID, "layer_types": [*["linear_attention"] * 3, "full_attention"], "hidden_size": 64, "head_dim": 256,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
            "rope_parameters": QWEN3_5_ROPE,
        },
    },
}  # fmt: skip
