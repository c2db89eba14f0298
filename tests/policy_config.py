"""The fields of a small policy's config.json, for tests that run no policy."""

POLICY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
