"""A run goes on from a checkpoint that release 0.1.0 wrote: every file, key and tensor as it wrote them.

Its optimizer was pickled, and is not read: training goes on from the served drafter with a fresh one.

The files are written here by hand, so that a change of what the plugin writes cannot change what it must read.
"""

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from verl_tlt.config import TLTConfig
from verl_tlt.messages.training import RolloutSampling
from verl_tlt.spot_worker.worker import SpotWorker
from verl_tlt.trainer.checkpoints import saved_drafter
from verl_tlt.trainer.run_setup import first_drafter

HIDDEN, VOCABULARY, WIDTH = 32, 24, 24
POLICY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": WIDTH, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "layers.0.self_attn.q_proj.weight": (32, 2 * HIDDEN),
    "layers.0.self_attn.k_proj.weight": (16, 2 * HIDDEN),
    "layers.0.self_attn.v_proj.weight": (16, 2 * HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
    "layers.0.input_layernorm.weight": (HIDDEN,),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
}
"""In the order in which the optimizer numbers them."""
DRAFTER = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 24,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 24,
    },
    "transformers_version": "5.10.4",
}
PROVENANCE = {
    "acceptance": [0.5, 0.25, 0.125], "data": "train.parquet", "data_sha256": None, "objective": "hass",
    "policy": "policy", "policy_step": 3, "steps": 3, "temperature": 1.0, "tokens_trained": 99, "version": 2,
    "versions": {"speculators": "0.9.0", "torch": "2.13.0", "transformers": "5.10.4", "verl_tlt": "0.1.0"},
}  # fmt: skip


def values(seed):
    rng = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


SERVED, CANDIDATE, MEAN, SQUARE = values(0), values(1), values(2), {n: v**2 for n, v in values(3).items()}


@pytest.fixture
def step_dir(tmp_path):
    """`global_step_3` of a run, with the drafter in it."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(POLICY))
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(DRAFTER))
    (directory / "provenance.json").write_text(json.dumps(PROVENANCE))
    (directory / "README.md").write_text("# EAGLE-3 drafter\n")
    save_file(SERVED, directory / "model.safetensors", metadata={"format": "pt"})
    group = {
        "lr": 0.00015, "betas": (0.9, 0.95), "eps": 1e-08, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
        "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
        "params": list(range(len(SHAPES))),
    }  # fmt: skip
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": MEAN[name], "exp_avg_sq": SQUARE[name]}
        for i, name in enumerate(SHAPES)
    }
    state = {
        "parameters": CANDIDATE,
        "optimizer": {"state": moments, "param_groups": [group]},
        "steps": 3,
        "skipped": 1,
        "rng": np.random.default_rng(5).bit_generator.state,
    }
    torch.save(state, directory / "training_state.pt")
    return directory.parent


def worker_of(step_dir, start):
    sampling = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)
    config = TLTConfig.from_dict({"buffer": {"min_tokens": 10}})
    return SpotWorker("a", config, str(step_dir.parent / "policy"), start.trainable, sampling, "cpu")


def test_the_engines_get_the_served_drafter(step_dir):
    start = first_drafter(TLTConfig(), str(step_dir.parent / "policy"), "bfloat16", 64, step_dir)
    assert (start.served.version, start.served.acceptance) == (2, (0.5, 0.25, 0.125))
    assert start.aux_layers == tuple(DRAFTER["eagle_aux_hidden_state_layer_ids"])
    learner = worker_of(step_dir, start).learner
    assert all(np.array_equal(learner.versions.served[name], value.numpy()) for name, value in SERVED.items())


def test_training_goes_on_with_a_fresh_optimizer(step_dir):
    worker = worker_of(step_dir, first_drafter(TLTConfig(), str(step_dir.parent / "policy"), "bfloat16", 64, step_dir))
    assert not asyncio.run(worker.resume(str(saved_drafter(step_dir))))
    assert all(np.array_equal(worker.learner.versions.candidate[name], value.numpy()) for name, value in SERVED.items())
