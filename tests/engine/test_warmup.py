"""`verl-tlt warmup` and `verl-tlt evaluate` as a user runs them: stock vLLM generates, and serves what came out.

The hardest case at once: it goes on from a drafter in SpecForge's layout, with a pruned vocabulary and a head of its
own, so that conversion, index maps and head are all proved by vLLM's own count.
"""

import json
import re

import pytest
import torch
from drafter_bits import holds
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.toy.assets import build_assets
from verl_tlt.commands.cli import app
from verl_tlt.drafter import (
    VerifierWeights,
    build_drafter,
    provenance,
    refresh_verifier_weights,
    save_drafter,
)

pytestmark = pytest.mark.engine

KEPT = torch.arange(0, 58)  # all but the tokens that the toy never uses


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return build_assets(tmp_path_factory.mktemp("toy"), width="small", train_rows=64, val_rows=32)


@pytest.fixture(scope="module")
def specforge(assets, tmp_path_factory):
    """An untrained drafter as SpecForge would have saved it."""
    path = tmp_path_factory.mktemp("specforge")
    model = build_drafter(assets.policy, seed=2)
    own = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in own.items()}
    tensors["lm_head.weight"] = VerifierWeights.from_policy_dir(assets.policy).lm_head[KEPT].float() * 1.1
    tensors["d2t"] = torch.zeros(len(KEPT), dtype=torch.int64)
    tensors["t2d"] = torch.arange(64) < len(KEPT)
    save_file(tensors, path / "model.safetensors")
    layer = model.config.transformer_layer_config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 256, "vocab_size": 64,
        "draft_vocab_size": len(KEPT), "intermediate_size": layer.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_from_prompts_to_an_accept_length_that_vllm_confirms(assets, specforge, tmp_path):
    out = tmp_path / "drafter"
    code, said = run(
        *("warmup", "--model", assets.policy, "--prompts", assets.train, "--out", out, "--drafter", specforge),
        *("--response-length", 160, "--epochs", 4, "--learning-rate", 3e-3, "--objective", "eagle"),
        *("--batch-tokens", 512, "--device", "cpu"),
    )
    assert code == 0, said
    assert re.search(r"generate: (\d+) of \1 responses", said)
    facts = provenance(out)
    assert facts["tau_sim"] > 1.15 and facts["started from"] == str(specforge)
    code, said = run(
        *("evaluate", out, "--model", assets.policy, "--prompts", assets.val),
        *("--response-length", 160, "--device", "cpu"),
    )
    assert code == 0 and "within 5 %" in said, said
    lengths = re.search(r"accept length [│|] ([\d.]+) [│|] ([\d.]+)", said)
    assert float(lengths[2]) > 1.1, said


def test_a_pruned_head_follows_the_live_policy_and_an_own_head_does_not(models, engine_of, tmp_path):
    kept = torch.arange(3, 400, 5)
    drafter = build_drafter(models["target"], draft_ids=kept)
    refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(models["target"]))
    for name, own_head in (("pruned", False), ("own", True)):
        drafter.config.own_head = own_head
        models[name] = save_drafter(drafter, tmp_path / name, {})
    with engine_of("pruned", policy="policies:longest") as engine:
        policy, served = engine.runner.get_model(), engine.runner.drafter.model
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.5)  # a weight sync
        for name in ("own", "pruned"):
            file = models[name] / "model.safetensors"
            reply = engine.rpc("tlt_load_drafter", str(file))
            current = torch.equal(served.lm_head.weight[: len(kept)], policy.lm_head.weight[kept])
            assert reply["ok"] and current == (name == "pruned")
            assert holds(engine, file) == (name == "own")
            assert holds(engine, file, leave_out=["lm_head.weight"])
        assert len(engine.generate(2, 16)[1]) == 16
