"""Tiny random policies with an MTP head in their files, as a release has them; every part of the head counts."""

import json

import torch
from safetensors.torch import load_file, save_file

from verl_tlt.drafter import VerifierWeights, load_own_head, refresh_verifier_weights
from verl_tlt.drafter.mtp_tensors import LAYOUTS, head_shapes
from verl_tlt.drafter.policy import policy_shape

SHAPE = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
RECURRENT = dict(
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"], mamba_ssm_dtype="float32",
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)
ARCHITECTURES = {
    "mimo": "MiMoForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def random_head(policy, seed=0):
    """Tensors of a head, float32, for the policy in a folder, or of these fields."""
    generator, head = torch.Generator().manual_seed(seed), {}
    for name, size in head_shapes(policy_shape(policy)).items():
        tensor = torch.randn(size, generator=generator)
        ones = 1.0 if "norm" in name and not name.startswith("mtp.") else 0.0
        head[name] = ones + 0.2 * tensor if len(size) == 1 else 2.0 * tensor / size[-1] ** 0.5
    return head


def one_by_one(head):
    """A head with its experts as Qwen3.5's releases hold them, each by itself."""
    apart = {
        name: tensor for name, tensor in head.items() if not name.endswith((".gate_up_proj", ".experts.down_proj"))
    }
    for name in head.keys() - apart.keys():
        experts, _, fused = name.rpartition(".")
        for i, tensor in enumerate(head[name]):
            if fused == "down_proj":
                apart[f"{experts}.{i}.down_proj.weight"] = tensor.clone()
                continue
            gate, up = tensor.chunk(2)
            apart[f"{experts}.{i}.gate_proj.weight"], apart[f"{experts}.{i}.up_proj.weight"] = gate.clone(), up.clone()
    return apart


def make_mtp_policy(path, family="mimo", dtype=torch.float32, **changes):
    """The policy of the family as a transformers model, saved to `path` with a random head; it is returned."""
    import transformers

    torch.manual_seed(0)
    if family == "mimo":  # transformers knows it by code of its own alone, and then as a Qwen2 with a head
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**SHAPE, **changes}))
    elif family == "qwen3_5":
        fields = {**SHAPE, **RECURRENT, "head_dim": 16, **changes}
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**fields))
    else:
        fields = {**SHAPE, **RECURRENT, **EXPERTS, "head_dim": 16, **changes}
        del fields["intermediate_size"]
        model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**fields))
    model = model.float().eval().requires_grad_(False)
    with torch.no_grad():  # sharper than at initialisation, and with a context that counts
        model.model.embed_tokens.weight.copy_(torch.randn(model.model.embed_tokens.weight.shape))
        model.lm_head.weight.mul_(20)
        model.model.norm.weight.add_(torch.rand(model.config.hidden_size) - 0.5)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "experts.down_proj")):
                weight.mul_(8)
            weight.copy_(weight.to(dtype))
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": [ARCHITECTURES[family]], LAYOUTS[ARCHITECTURES[family]].count: 1}
    (path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    tensors = load_file(path / "model.safetensors") | random_head(path)
    tensors = {name: t if name.endswith("A_log") else t.to(dtype) for name, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return model


def head_of(policy):
    """The head in a policy's folder as a drafter, with the policy's embedding, output head and norm."""
    model = load_own_head(policy, policy)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(policy))
    return model


def without_head(path, shards=1, count=0):
    """What transformers leaves of the policy in a folder when it saves it, in so many files; returns the head."""
    tensors = load_file(path / "model.safetensors")
    layout = next(layout for layout in LAYOUTS.values() if any(n.startswith(layout.prefix) for n in tensors))
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith(layout.prefix)}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {layout.count: count}))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return head
    (path / "model.safetensors").unlink()
    owners = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(owners.values()):
        save_file({n: tensors[n] for n, owner in owners.items() if owner == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    return head
