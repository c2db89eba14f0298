"""On disk: complete or absent, the same after loading, and one sentence for everything that does not fit."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load, load_file
from tiny_policy import make_policy, verifier_weights

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    build_drafter,
    check_drafter,
    check_owner,
    fingerprint,
    load_drafter,
    load_training_state,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
)
from verl_tlt.ownership import other_owner
from verl_tlt.trainer.run_setup import first_drafter


@pytest.fixture
def saved(drafter, tmp_path):
    return save_drafter(drafter, tmp_path / "drafter", {"policy": "tiny", "rl_steps": 7})


def edit(directory, **changes):
    """Change fields of config.json; a dotted name reaches into transformer_layer_config."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        owner = config["transformer_layer_config"] if name in config["transformer_layer_config"] else config
        owner[name] = value
    file.write_text(json.dumps(config))


def test_round_trip_without_the_policys_tensors(drafter, saved, policy, policy_dir):
    names = load_file(saved / "model.safetensors").keys()
    assert not any("embed" in n or "lm_head" in n or "verifier" in n for n in names)
    loaded = load_drafter(saved, policy_dir, min_context=200)
    assert fingerprint(serving_tensors(loaded)) == fingerprint(serving_tensors(drafter))
    assert loaded.lm_head.weight.isnan().all()  # until refreshed from the policy
    refresh_verifier_weights(loaded, verifier_weights(policy))
    assert loaded.config.to_json_string() == drafter.config.to_json_string()
    facts = provenance(saved)
    assert facts.pop("versions").keys() >= {"verl_tlt", "torch", "transformers", "speculators"}
    assert facts == {"policy": "tiny", "rl_steps": 7}


def standalone(model):
    """Its tensors with embedding and head, as others save theirs."""
    own = {"embed_tokens.weight": model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    return serving_tensors(model) | {name: tensor.detach().clone() for name, tensor in own.items()}


def test_a_standalone_file_brings_the_policys_tensors(drafter, policy, tmp_path):
    saved = save_drafter(drafter, tmp_path / "alone", {}, tensors=standalone(drafter))
    loaded = load_drafter(saved, policy.config)
    assert torch.equal(loaded.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight)


def test_pruned_vocabulary_always_brings_its_head_and_maps(policy, tmp_path):
    model = build_drafter(policy.config, draft_ids=torch.tensor([1, 4, 30]))
    refresh_verifier_weights(model, verifier_weights(policy))
    saved = save_drafter(model, tmp_path / "pruned", {})
    loaded = load_drafter(saved, policy.config)
    assert torch.equal(loaded.d2t, model.d2t) and torch.equal(loaded.t2d, model.t2d)
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight[[1, 4, 30]])


def test_sixteen_bit_files_load_as_float32(drafter, policy, tmp_path):
    half = save_drafter(drafter, tmp_path / "b", {}, tensors=serving_tensors(drafter, torch.bfloat16))
    loaded = load_drafter(half, policy.config)
    assert loaded.fc.weight.dtype == torch.float32
    assert fingerprint(serving_tensors(loaded), torch.bfloat16) == fingerprint(serving_tensors(drafter), torch.bfloat16)


def test_as_one_value_for_the_object_store(drafter, policy, tmp_path):
    config, weights, digest = to_drafter_file(drafter, "bfloat16")
    tensors = load(weights)
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert fingerprint(tensors) == digest
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    check_drafter(tmp_path, policy.config)


def test_what_is_handed_out_does_not_change_as_training_goes_on(drafter):
    tensors = serving_tensors(drafter)
    before = fingerprint(tensors)
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    assert fingerprint(tensors) == before


def test_a_failure_in_the_middle_leaves_the_old_one(drafter, saved, policy):
    before = load_file(saved / "model.safetensors")["fc.weight"]
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    with pytest.raises(TypeError):
        save_drafter(drafter, saved, {"not": object()})  # found out after the weights were written
    assert [p.name for p in saved.parent.iterdir()] == ["drafter"]
    assert torch.equal(load_drafter(saved, policy.config).fc.weight, before)
    save_drafter(drafter, saved, {"rl_steps": 8})
    assert [p.name for p in saved.parent.iterdir()] == ["drafter"]
    assert torch.equal(load_drafter(saved, policy.config).fc.weight, drafter.fc.weight)


def test_killed_in_the_middle_leaves_the_old_one(tmp_path):
    target = tmp_path / "drafter"
    target.mkdir()
    (target / "model.safetensors").write_text("old")
    code = f"""
        import os, pathlib, signal
        from verl_tlt.drafter.checkpoint import replaced
        with replaced(pathlib.Path({str(target)!r})) as draft:
            (draft / "model.safetensors").write_text("new")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -signal.SIGKILL
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]
    assert (target / "model.safetensors").read_text() == "old"


def test_file_systems_without_an_exchange(tmp_path, monkeypatch):
    from verl_tlt.drafter import checkpoint as atomic

    monkeypatch.setattr(atomic, "_RENAME_EXCHANGE", 1 << 30)  # no such flag: refused, as such file systems do
    for text in ("old", "new"):
        with atomic.replaced(tmp_path / "d") as draft:
            (draft / "file").write_text(text)
    assert (tmp_path / "d" / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_nan_is_not_saved(policy, tmp_path):
    model = build_drafter(policy.config)  # its head and embedding were never filled
    save_drafter(model, tmp_path / "own", {})
    with pytest.raises(DrafterError, match="NaN"):
        save_drafter(model, tmp_path / "alone", {}, tensors=standalone(model))
    assert not (tmp_path / "alone").exists()
    with torch.no_grad():
        model.fc.weight[0, 0] = float("inf")
    with pytest.raises(DrafterError, match=r"fc.weight holds NaN or infinity"):
        save_drafter(model, tmp_path / "infinite", {})


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (1e5, "float16")])
def test_what_an_engine_would_refuse_is_not_exported(policy, value, dtype):
    model = build_drafter(policy.config)
    with torch.no_grad():
        model.fc.weight[0, 0] = value
    with pytest.raises(DrafterError, match=f"fc.weight holds numbers that are not finite as {dtype}"):
        to_drafter_file(model, dtype)
    if dtype == "float16":
        to_drafter_file(model, "bfloat16")


def refusal(directory, policy, **arguments):
    """The sentence of `check_drafter`, which `load_drafter` repeats."""
    with pytest.raises(DrafterError) as caught:
        check_drafter(directory, policy, **arguments)
    with pytest.raises(DrafterError) as again:
        load_drafter(directory, policy, **arguments)
    sentence = str(caught.value)
    assert str(again.value) == sentence and sentence.endswith(".") and "\n" not in sentence
    return sentence


def test_missing_pieces(saved, policy, tmp_path):
    assert f"{tmp_path / 'nowhere'} is not a directory" in refusal(tmp_path / "nowhere", policy.config)
    (saved / "config.json").rename(tmp_path / "config.json")
    assert "config.json does not exist" in refusal(saved, policy.config)
    (saved / "config.json").write_text("{")
    assert "config.json is not readable JSON" in refusal(saved, policy.config)
    (tmp_path / "config.json").rename(saved / "config.json")
    (saved / "model.safetensors").unlink()
    assert "model.safetensors does not exist" in refusal(saved, policy.config)
    torch.save({}, saved / "pytorch_model.bin")
    assert "pytorch_model.bin is pickled" in refusal(saved, policy.config)


def test_truncated_or_pickled_under_the_right_name(saved, policy):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "model.safetensors is truncated" in refusal(saved, policy.config)
    torch.save({"fc.weight": torch.zeros(2)}, file)
    assert "not a safetensors file" in refusal(saved, policy.config)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 64}, "hidden_size=32, but the policy's is 64"),
        ({"vocab_size": 50}, "vocab_size=48, but the policy's is 50"),
        ({"num_hidden_layers": 3}, r"eagle_aux_hidden_state_layer_ids=[1, 2, 3] is outside 0..2"),
    ],
)
def test_a_drafter_for_another_policy(saved, change, field):
    sentence = refusal(saved, make_policy(**change).config)
    assert field in sentence and "config.json" in sentence


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids must be 3"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids must be a list"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be 'eagle3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"draft_vocab_size": 99}, "draft_vocab_size must be 1..48"),
        ({"draft_vocab_size": 20}, "no tensor 'lm_head.weight'"),
        ({"head_dim": 32}, "q_proj.weight is [64, 64], but config.json asks for [128, 64]"),
        ({"num_key_value_heads": 1}, "k_proj.weight is [32, 64], but config.json asks for [16, 64]"),
        ({"intermediate_size": 60}, "gate_proj.weight is [64, 32], but config.json asks for [60, 32]"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive integer"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be an object"),
    ],
)
def test_a_config_that_contradicts_itself(saved, policy, change, field):
    edit(saved, **change)
    assert field in refusal(saved, policy.config)


def test_a_longer_context_than_the_file_says(saved, policy):
    edit(saved, max_position_embeddings=256)
    check_drafter(saved, policy.config, min_context=257)
    assert load_drafter(saved, policy.config).config.transformer_layer_config.max_position_embeddings == 256
    longer = load_drafter(saved, policy.config, min_context=257)
    assert longer.config.transformer_layer_config.max_position_embeddings == 257
    edit(saved, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "max_position_embeddings=256 is below 257" in refusal(saved, policy.config, min_context=257)
    edit(saved, max_position_embeddings=None)
    assert "max_position_embeddings must be a positive integer, not None" in refusal(saved, policy.config)


SERVED = ["README.md", "config.json", "model.safetensors", "provenance.json"]


def test_the_served_folder_holds_what_is_served_and_anybody_may_read_it(drafter, tmp_path):
    mask = os.umask(0o022)
    try:
        saved = save_drafter(drafter, tmp_path / "drafter", {}, training_state={"steps": 3})
    finally:
        os.umask(mask)
    assert sorted(p.name for p in saved.iterdir() if p.is_file()) == SERVED
    assert {oct(p.stat().st_mode & 0o777) for p in saved.rglob("*") if p.is_file()} == {"0o644"}
    assert oct(saved.stat().st_mode & 0o777) == "0o755"
    assert load_training_state(saved) == {"steps": 3}
    assert sorted(p.name for p in save_drafter(drafter, tmp_path / "plain", {}).iterdir()) == SERVED


@pytest.mark.parametrize("name", ["training_state.pt", "training/training_state.pt"])
def test_a_pickled_state_is_not_read_and_that_is_said(saved, caplog, name):
    (saved / name).parent.mkdir(exist_ok=True)
    torch.save({"steps": 5}, saved / name)
    with caplog.at_level(logging.WARNING):
        assert load_training_state(saved) is None
    assert f"{saved / name} is pickled and not read" in caplog.text


def test_training_state_is_optional_and_its_damage_named(saved):
    assert load_training_state(saved) is None
    (saved / "training").mkdir()
    (saved / "training" / "training_state.safetensors").write_bytes(b"cut off")
    with pytest.raises(DrafterError, match=r"training/training_state\.safetensors is damaged"):
        load_training_state(saved)


def test_another_tokenizer_of_the_same_size_is_refused(drafter, policy_dir, tmp_path):
    def policy_with(words, layout):
        path = shutil.copytree(policy_dir, tmp_path / f"policy-{'-'.join(words)}-{layout}")
        content = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": []}
        (path / "tokenizer.json").write_text(json.dumps(content, indent=layout))
        return path

    saved = save_drafter(drafter, tmp_path / "drafter", {}, policy=policy_with("ab", 1))
    check_drafter(saved, policy_with("ab", 4))  # the same vocabulary, saved by another release
    check_drafter(saved, policy_dir)  # nothing to compare with
    assert "this drafter was trained for another tokenizer" in refusal(saved, policy_with("ba", 1))


def test_the_model_card_says_what_it_is_and_where_it_comes_from(drafter, policy_dir, tmp_path):
    facts = {"policy": "org/policy", "steps": 70, "tokens": 9, "data_sha256": "ab12", "tau_sim": 2.5}
    card = (save_drafter(drafter, tmp_path / "d", facts, policy=policy_dir) / "README.md").read_text()
    command = next(line for line in card.splitlines() if "vllm serve" in line)
    config = json.loads(command.partition("--speculative-config '")[2].rstrip("'"))
    assert "vllm serve org/policy" in command and config["method"] == "eagle3"
    for row in ("| steps | 70 |", "| data_sha256 | ab12 |", "| tau_sim | 2.5 |", "speculators 0.9"):
        assert row in card


def test_another_users_is_refused(everybodys, give_away, policy_dir, drafter):
    saved = save_drafter(drafter, everybodys / "drafter", {})
    settings = TLTConfig.from_dict({"drafter": {"path": str(saved)}})

    def start():
        return first_drafter(settings, str(policy_dir), "float32", 64, None)

    assert start().origin == str(saved)
    give_away(saved)
    for refused in (lambda: check_owner(saved), start):
        with pytest.raises(DrafterError, match=rf"^{saved} may be another user's drafter: {saved} belongs to user"):
            refused()


def test_ones_own_counts_whatever_the_umask(tmp_path, drafter):
    mask = os.umask(0)
    try:
        saved = save_drafter(drafter, tmp_path / "drafter", {}, training_state={"steps": 3})
    finally:
        os.umask(mask)
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) == 5 and not any(other_owner(file) for file in files)
    (saved / "model.safetensors").chmod(0o666)
    with pytest.raises(DrafterError, match=r"everybody may write to .*model\.safetensors"):
        check_owner(saved)
