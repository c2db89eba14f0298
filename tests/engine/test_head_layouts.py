"""Heads as other projects publish them: stock vLLM, which serves their folder, accepts what our reading predicts."""

import json
from itertools import cycle, islice

import pytest
import torch
from drafter_bits import holds
from head_of_width import write_head
from safetensors.torch import load_file, save_file
from test_serve_drafter import AUX, GREEDY, SHAPE, K, decode, observe, plain, predicted, trained  # noqa: F401
from tiny_engine import prompts

from benchmarks.lossless.tiny_policy import V
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import DrafterTrainer, accept_length, acceptance, batches, save_drafter
from verl_tlt.drafter.capture import PolicyStates, Text, load_policy
from verl_tlt.drafter.checkpoint import stage
from verl_tlt.messages.training import SpotPlan
from verl_tlt.server.engine_arguments import speculative_config
from verl_tlt.spot_trainer.trainer import SpotTrainer
from verl_tlt.trainer.run_setup import first_drafter

pytestmark = pytest.mark.engine

LAYOUTS = {
    "SpecForge": {},
    "speculators, residual after the norm": {"norm_before_residual": False},
    "SafeAILab, residual before the norm, narrower than the policy": {"norm_before_residual": True},
}
NARROW = 32  # the policy is 64 wide


def publish(ours, folder, layout):
    """Our drafter's tensors in another project's layout, with what its config says."""
    folder.mkdir()
    config, tensors = json.loads((ours / "config.json").read_text()), load_file(ours / "model.safetensors")
    if layout.startswith("speculators"):
        config = {k: v for k, v in config.items() if k not in ("norm_before_residual", "own_head")}
    else:
        config = config["transformer_layer_config"] | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config["draft_vocab_size"],
            "target_hidden_size": SHAPE["hidden_size"],
            # Of this shallow policy vLLM's default layers, 2, L/2 and L-3, are two and not three.
            "eagle_aux_hidden_state_layer_ids": list(AUX),
        }
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config | LAYOUTS[layout]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def narrow(trained, plain, tmp_path_factory):  # noqa: F811
    """Directory of a head that is narrower than the policy, overfitted on texts of it."""
    policy, policy_dir, _ = trained
    root = tmp_path_factory.mktemp("narrow")
    model = predicted((policy, policy_dir, write_head(root / "new", policy_dir, NARROW)))
    trainer, sequences = DrafterTrainer(model, learning_rate=3e-3, ttt_steps=2), observe(policy, plain[:, :-1])
    losses = [trainer.step(batch).loss for batch in islice(batches(cycle(sequences), 280), 150)]
    assert losses[20] < losses[0]
    return save_drafter(model, root / "trained", {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_and_served_accept_length_agree(trained, plain, narrow, engine_of, tmp_path, layout):  # noqa: F811
    policy, policy_dir, ours = trained
    theirs = publish(narrow if "narrower" in layout else ours, tmp_path / "theirs", layout)
    config = speculative_config(str(theirs), K)
    with engine_of(drafter=None, model=str(policy_dir), speculative_config=config) as engine:
        counted = decode(engine, 8, GREEDY, temperature=0.0)[1]
    served = 1 + counted[1:].sum() / counted[0]
    model = predicted((policy, policy_dir, theirs))
    scores = acceptance(model, observe(policy, plain[:, :-1]), temperature=0.0, max_draft=K)
    assert accept_length(scores) == pytest.approx(served, rel=0.03)
    assert served > 1.3 or "narrower" not in layout


def test_what_is_trained_of_a_narrower_head_is_live_to_the_bit(engine_of, models, stock_tokens, tmp_path, monkeypatch):
    """Published by the spot trainer, with the head's own embedding and output head, which sleep takes away too."""
    target = models["target"]
    asked = [request["prompt_token_ids"] for request in prompts(8)]
    texts = [Text((*asked[i], *tokens), len(asked[i])) for i, tokens in enumerate(stock_tokens)]
    theirs = write_head(tmp_path / "theirs", target, NARROW, draft_ids=torch.arange(0, V, 2))
    settings = TLTConfig.from_dict({"drafter": {"path": str(theirs)}})
    start = first_drafter(settings, str(target), "float32", 512, None)
    stage(start.served.config, start.served.weights, tmp_path / "served")
    monkeypatch.setitem(models, "narrow", tmp_path / "served")
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    plan = SpotPlan(
        policy_dir=str(target), drafter=start.trainable, sampling=sampling, dtype="float32", min_tokens=10, gate=False
    )
    spot = SpotTrainer(plan)
    spot.add(1, PolicyStates(load_policy(str(target), "cpu"), start.aux_layers)(texts))
    assert spot.train(0, lambda: False).verdict.publishes
    file = spot.export()
    stage(file.config, file.weights, tmp_path / "published")
    with engine_of("narrow") as engine:
        assert engine.live_drafter.shared_modules() == () and holds(engine, tmp_path / "served" / "model.safetensors")
        with torch.no_grad():
            for parameter in engine.live_drafter.model.parameters():
                parameter.fill_(7)
        assert engine.rpc("tlt_load_drafter", str(tmp_path / "published" / "model.safetensors")) is None
        assert holds(engine, tmp_path / "published" / "model.safetensors")
        assert engine.generate(8, 96) == stock_tokens
