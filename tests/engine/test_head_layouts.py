"""Heads as other projects publish them: stock vLLM, which serves their folder, accepts what our reading predicts."""

import json

import pytest
from safetensors.torch import load_file, save_file
from test_serve_drafter import AUX, GREEDY, K, decode, observe, plain, predicted, trained  # noqa: F401

from verl_tlt.drafter import accept_length, acceptance
from verl_tlt.server.engine_arguments import speculative_config

pytestmark = pytest.mark.engine

LAYOUTS = {
    "SpecForge": {},
    "SafeAILab, residual before the norm": {"norm_before_residual": True},
    "speculators": {"norm_before_residual": False},
    "speculators, nothing said": {},
}


def publish(ours, folder, layout):
    """Our drafter's tensors in another project's layout, with what its config says."""
    folder.mkdir()
    config, tensors = json.loads((ours / "config.json").read_text()), load_file(ours / "model.safetensors")
    if layout.startswith("speculators"):
        config = {k: v for k, v in config.items() if k != "norm_before_residual"}
    else:
        config = config["transformer_layer_config"] | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config["draft_vocab_size"],
            # Of this shallow policy vLLM's default layers, 2, L/2 and L-3, are two and not three.
            "eagle_aux_hidden_state_layer_ids": list(AUX),
        }
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config | LAYOUTS[layout]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_and_served_accept_length_agree(trained, plain, engine_of, tmp_path, layout):  # noqa: F811
    policy, policy_dir, ours = trained
    theirs = publish(ours, tmp_path / "theirs", layout)
    config = speculative_config(str(theirs), K)
    with engine_of(drafter=None, model=str(policy_dir), speculative_config=config) as engine:
        counted = decode(engine, 8, GREEDY, temperature=0.0)[1]
    served = 1 + counted[1:].sum() / counted[0]
    model = predicted((policy, policy_dir, theirs))
    scores = acceptance(model, observe(policy, plain[:, :-1]), temperature=0.0, max_draft=K)
    assert accept_length(scores) == pytest.approx(served, rel=0.03)
