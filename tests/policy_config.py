"""The folder of a small policy, for tests that run no policy: its config, and the tensors that a drafter takes."""

import json

POLICY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


def write_policy(folder, **fields):
    """Write a policy with these fields in place of `POLICY`'s."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = POLICY | fields
    (folder / "config.json").write_text(json.dumps(config))
    table = (config["vocab_size"], config["hidden_size"])
    shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": table[1:]}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
