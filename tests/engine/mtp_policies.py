"""Tiny policies with an MTP head in their checkpoint, as releases have it, and heads in files of their own."""

from __future__ import annotations

import json
from pathlib import Path

import families
import torch
from safetensors.torch import load_file, save_file

from benchmarks.lossless.tiny_policy import H, build_target
from verl_tlt.drafter.mtp_tensors import read_head
from verl_tlt.drafter.policy import policy_shape

DAMPED = 0.25
"""How much a head's layer counts, against the policy's last one: its guess is mostly the present token's successor."""


def build_mtp_policy(path: Path, family: str, vocab: int, state: float = 1.0) -> dict[str, torch.Tensor]:
    """A policy of the family saved to `path`, in 16 bits: "mimo", or one of `families` with `mtp.*`; returns its head.

    Experts are one by one in the policy's files, as transformers writes them, and in one tensor in what is returned.
    `state`: how much recurrent states count, if it has any.
    """
    if family == "mimo":
        build_target(path, "qwen2", vocab)
        more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    else:
        families.build_family(path, family, vocab, state)
        more = {"mtp_num_hidden_layers": 1}
    config = json.loads((path / "config.json").read_text())
    (config.get("text_config") or config).update(more)
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors = {name: t if name.endswith("A_log") else t.bfloat16() for name, t in tensors.items()}
    head = _head(tensors, family)
    save_file(tensors | head, path / "model.safetensors", {"format": "pt"})
    return read_head(path, policy_shape(path))


def _head(policy: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """A layer like the policy's last one, damped, behind a projection that passes the token's embedding on."""
    at = next(name for name in policy if name.endswith("layers.3.self_attn.o_proj.weight")).partition("layers.3.")[0]
    last, norm = f"{at}layers.3.", policy[f"{at}norm.weight"].clone()
    layer = {name.removeprefix(last): t.clone() for name, t in policy.items() if name.startswith(last)}
    for name, weight in layer.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= DAMPED
    token, state = torch.eye(H).bfloat16(), (0.05 * torch.randn(H, H)).bfloat16()
    if family == "mimo":
        begin, norms = "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm")
        more = {"input_proj.weight": torch.cat([state, token], 1), "final_layernorm.weight": norm}
        more |= {f"{name}.weight": torch.ones(H).bfloat16() for name in norms}
        return {begin + name: t for name, t in {**layer, **more}.items()}
    more = {"mtp.fc.weight": torch.cat([token, state], 1), "mtp.norm.weight": norm}
    # These multiply by one more than their weight.
    more |= {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(H).bfloat16() for name in ("hidden", "embedding")}
    return {**{f"mtp.layers.0.{name}": t for name, t in layer.items()}, **more}


def save_head(path: Path, head: dict[str, torch.Tensor], noise: bool = False) -> None:
    """A head as it is published; `noise`: one of its shape that knows nothing."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    if noise:
        head = {name: 0.02 * torch.randn(t.shape).bfloat16() for name, t in head.items()}
    save_file(head, path / "model.safetensors")
