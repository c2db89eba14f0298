"""Which drafter a run starts with."""

import json

from policy_config import POLICY

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import build_drafter, check_drafter, load_drafter, save_drafter
from verl_tlt.trainer.checkpoints import CHECKPOINT
from verl_tlt.trainer.run_setup import first_drafter

SHORT, LONG = 300, 1500
"""Longest prompt, response and draft of a first run, and of one that goes on from it."""


def policy_with(tmp_path, **rope):
    path = tmp_path / "policy"
    path.mkdir()
    fields = POLICY | {"max_position_embeddings": 2000, "rope_parameters": {"rope_theta": 1e4, **rope}}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def positions(start):
    """How many positions each of both files allows."""
    layers = (json.loads(file.config)["transformer_layer_config"] for file in (start.trainable, start.served))
    return [layer["max_position_embeddings"] for layer in layers]


def settings(max_draft_length):
    return TLTConfig.from_dict({"speculation": {"max_draft_length": max_draft_length}})


def test_a_new_drafter_serves_whatever_its_policy_does(tmp_path):
    policy = policy_with(tmp_path, rope_type="default")
    start = first_drafter(settings(3), str(policy), "bfloat16", SHORT, None)
    assert positions(start) == [2016, 2016] and start.served.untrained


def test_a_checkpoint_of_a_shorter_run_goes_on_in_a_longer_one(tmp_path):
    """As releases before this one wrote them: the first run's length is all that its RoPE table held."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 256
    policy, step = policy_with(tmp_path, **rope), tmp_path / "global_step_7"
    saved = build_drafter(policy, max_position_embeddings=SHORT, seed=5)
    facts = {"version": 4, "acceptance": [0.6, 0.4, 0.2], "tokens_trained": 70}
    save_drafter(saved, step / CHECKPOINT, facts, policy=policy)
    start = first_drafter(settings(7), str(policy), "float32", LONG, step)
    assert positions(start) == [LONG, LONG] and (start.served.version, start.tokens_trained) == (4, 70)
    assert not start.served.untrained
    for file in ("config", "weights"):  # what the engines get stands for itself
        value = getattr(start.served, file)
        name = {"config": "config.json", "weights": "model.safetensors"}[file]
        (tmp_path / "served").mkdir(exist_ok=True)
        (tmp_path / "served" / name).write_bytes(value.encode() if isinstance(value, str) else value)
    check_drafter(tmp_path / "served", policy, LONG)
    first, longer = (m.rotary_emb.inv_freq for m in (saved, load_drafter(tmp_path / "served", policy)))
    assert first.equal(longer), "positions that were trained keep their angles"


def test_a_random_head_in_a_checkpoint_is_still_untrained(tmp_path):
    policy, step = policy_with(tmp_path, rope_type="default"), tmp_path / "global_step_2"
    facts = {"version": 0, "acceptance": [0.0, 0.0, 0.0]}
    save_drafter(build_drafter(policy, max_position_embeddings=SHORT), step / CHECKPOINT, facts, policy=policy)
    start = first_drafter(settings(3), str(policy), "bfloat16", SHORT, step)
    assert start.served.untrained and start.checkpoint == step / CHECKPOINT


def test_with_n_grams_no_head_is_built_and_nothing_is_known_of_the_drafter_that_is_named(tmp_path):
    policy = policy_with(tmp_path, rope_type="default")
    facts = {"acceptance": [0.8, 0.7, 0.6]}
    drafter = save_drafter(build_drafter(policy, max_position_embeddings=SHORT), tmp_path / "own", facts, policy=policy)
    asked = TLTConfig.from_dict({"speculation": {"source": "ngram"}, "drafter": {"path": str(drafter)}})
    start = first_drafter(asked, str(policy), "bfloat16", SHORT, None)
    assert not start.served.weights and start.served.acceptance == () and not start.served.untrained
