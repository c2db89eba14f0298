"""On disk: complete or absent, the same after loading, and one sentence for everything that does not fit."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tiny_policy import drafter_of, make_policy, verifier_weights

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    build_drafter,
    check_drafter,
    check_owner,
    fingerprint,
    from_drafter_file,
    load_drafter,
    load_training_state,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
)
from verl_tlt.drafter.checkpoint import read_state, replaced, write_state
from verl_tlt.files.ownership import other_owner
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


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_need_not_divide_the_hidden_size(heads, tmp_path):
    """As in policies with a `head_dim` of their own."""
    policy = make_policy(num_attention_heads=heads, num_key_value_heads=1)
    loaded = load_drafter(save_drafter(drafter_of(policy), tmp_path / "drafter", {}), policy.config)
    served = from_drafter_file(*to_drafter_file(loaded, "float32")[:2], "sdpa")
    assert served.layers[0].self_attn.q_proj.weight.shape == (heads * 16, 64)
    assert served.config.to_json_string() == loaded.config.to_json_string()


def test_a_home_directory_is_filled_in(drafter, policy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    saved = save_drafter(drafter, "~/drafter", {}, training_state={"steps": 3})
    assert saved == tmp_path / "home" / "drafter" and load_training_state("~/drafter") == {"steps": 3}
    load_drafter("~/drafter", policy.config)


def standalone(model):
    """Its tensors with embedding and head, as others save theirs, and more that nobody needs."""
    own = {"embed_tokens.weight": model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    own |= {"verifier_lm_head.weight": model.lm_head.weight, "verifier_norm.weight": torch.ones(3)}
    own["rotary_emb.inv_freq"] = torch.ones(8)
    return serving_tensors(model) | {name: tensor.detach().clone() for name, tensor in own.items()}


def test_a_standalone_file_brings_the_policys_tensors(drafter, policy, tmp_path):
    saved = save_drafter(drafter, tmp_path / "alone", {}, tensors=standalone(drafter))
    loaded = load_drafter(saved, policy.config)
    assert torch.equal(loaded.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight)


def test_pruned_vocabulary_always_brings_its_head_and_maps(policy, tmp_path):
    model = drafter_of(policy, draft_ids=torch.tensor([1, 4, 30]))
    saved = save_drafter(model, tmp_path / "pruned", {})
    loaded = load_drafter(saved, policy.config)
    assert torch.equal(loaded.d2t, model.d2t) and torch.equal(loaded.t2d, model.t2d)
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight[[1, 4, 30]])


def test_as_one_value_for_the_object_store(drafter, policy, tmp_path):
    config, weights, digest = to_drafter_file(drafter, "bfloat16")
    tensors = load(weights)
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert fingerprint(tensors) == digest
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    for loaded in (load_drafter(tmp_path, policy.config), from_drafter_file(config, weights, "eager")):
        assert loaded.fc.weight.dtype == torch.float32
        assert fingerprint(serving_tensors(loaded, torch.bfloat16)) == digest


def test_a_failure_in_the_middle_leaves_the_old_one(drafter, saved, policy):
    taken, before = serving_tensors(drafter), load_file(saved / "model.safetensors")["fc.weight"]
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    assert torch.equal(taken["fc.weight"], before), "what was handed out does not change as training goes on"
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


def test_a_rename_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    def write(text):
        with replaced(tmp_path / "d") as draft:
            (draft / "file").write_text(text)

    def refuse(path, target):
        if ".new-" in path.name:
            raise OSError("refused")
        os.rename(path, target)

    write("old")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="refused"):
        patched.setattr(Path, "rename", refuse)
        write("lost")
    assert (tmp_path / "d" / "file").read_text() == "old"
    write("new")
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
    with pytest.raises(DrafterError, match=r"fc\.weight holds numbers that are not finite as float32"):
        to_drafter_file(model, "float32")
    with torch.no_grad():
        model.fc.weight[0, 0] = 1e5
    with pytest.raises(DrafterError, match=r"fc\.weight holds numbers that are not finite as float16"):
        to_drafter_file(model, "float16")
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


def test_a_folder_that_may_not_be_looked_into(saved, policy, monkeypatch):
    stat = os.stat

    def refused(path, *more, **options):
        if Path(str(path)).is_relative_to(saved):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *more, **options)

    monkeypatch.setattr(os, "stat", refused)  # root may look anywhere
    assert f"{saved} is not a directory" in refusal(saved, policy.config)


def test_missing_pieces(saved, policy, tmp_path):
    assert f"{tmp_path / 'nowhere'} is not a directory" in refusal(tmp_path / "nowhere", policy.config)
    config, weights = saved / "config.json", saved / "model.safetensors"
    whole = config.read_text(), weights.read_bytes()
    config.unlink()
    assert "config.json does not exist" in refusal(saved, policy.config)
    config.write_text("{")
    assert "config.json is not readable JSON" in refusal(saved, policy.config)
    config.write_text(whole[0])
    weights.unlink()
    assert "model.safetensors does not exist" in refusal(saved, policy.config)
    weights.write_bytes(whole[1][: len(whole[1]) // 2])
    assert "model.safetensors is no complete safetensors file" in refusal(saved, policy.config)
    torch.save({"fc.weight": torch.zeros(2)}, weights)
    assert "no complete safetensors file" in refusal(saved, policy.config)


def test_a_drafter_for_another_policy(saved):
    assert "vocab_size=48, but the policy's is 50" in refusal(saved, make_policy(vocab_size=50).config)
    sentence = refusal(saved, make_policy(num_hidden_layers=3).config)
    assert "config.json: eagle_aux_hidden_state_layer_ids=[1, 2, 3] is outside 0..2" in sentence


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids must be 3"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids must be a valid list"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be 'eagle3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"draft_vocab_size": 99}, "draft_vocab_size must be 1..48"),
        ({"draft_vocab_size": 20}, "no tensor 'lm_head.weight'"),
        ({"num_key_value_heads": 1}, "k_proj.weight is [32, 64], but config.json asks for [16, 64]"),
        ({"num_attention_heads": None}, "num_attention_heads must be a valid integer"),
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
    assert "max_position_embeddings must be a valid integer, not None" in refusal(saved, policy.config)


@pytest.mark.parametrize("name", ["training_state.pt", "training/training_state.pt"])
def test_a_pickled_state_is_not_read_and_that_is_said(saved, caplog, name):
    (saved / name).parent.mkdir(exist_ok=True)
    torch.save({"steps": 5}, saved / name)
    with caplog.at_level(logging.WARNING):
        assert load_training_state(saved) is None
    assert f"{saved / name} is pickled and not read" in caplog.text


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


@pytest.mark.parametrize("umask", [0o022, 0])
def test_the_served_folder_holds_what_is_served_and_only_its_owner_may_change_it(drafter, tmp_path, umask):
    mask = os.umask(umask)
    try:
        saved = save_drafter(drafter, tmp_path / "drafter", {}, training_state={"steps": 3})
    finally:
        os.umask(mask)
    served = ["README.md", "config.json", "model.safetensors", "provenance.json"]
    assert sorted(p.name for p in saved.iterdir() if p.is_file()) == served
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) == 5 and not any(other_owner(file) for file in files)
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(0o666 & ~umask & ~0o002)}
    assert load_training_state(saved) == {"steps": 3}
    plain = save_drafter(drafter, tmp_path / "plain", {})
    assert load_training_state(plain) is None and sorted(p.name for p in plain.iterdir()) == served
    (saved / "model.safetensors").chmod(0o666)
    with pytest.raises(DrafterError, match=r"everybody may write to .*model\.safetensors"):
        check_owner(saved)


def test_a_training_state_comes_back_to_the_bit(tmp_path):
    rng = np.random.default_rng(5).bit_generator.state
    state = {
        "parameters": {"fc.weight": torch.randn(3, 4).t(), "half": torch.randn(2).bfloat16()},
        "moments": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4, dtype=torch.int64)}],
        "groups": [{"lr": 1e-3, "fused": None, "amsgrad": False}],
        "rng": rng, "loss": float("inf"), "name": "tensor", "empty": {},
    }  # fmt: skip
    write_state(state, tmp_path / "s")
    found = read_state(tmp_path / "s")
    assert list(found) == list(state)
    for name, value in state["parameters"].items():
        assert found["parameters"][name].dtype == value.dtype and torch.equal(found["parameters"][name], value)
    for one, two in zip(found["moments"], state["moments"], strict=True):
        assert torch.equal(one["step"], two["step"]) and one["step"].dtype == two["step"].dtype
    rest = ("groups", "rng", "loss", "name", "empty")
    assert [found[key] for key in rest] == [state[key] for key in rest]
    names = {"parameters/fc.weight", "parameters/half", "moments/0/step", "moments/1/step"}
    assert load_file(tmp_path / "s").keys() == names


def test_what_is_no_training_state_is_named(tmp_path):
    file = tmp_path / "s"
    write_state({"a": torch.zeros(100)}, file)
    for content in (file.read_bytes()[:-4], b"", b"\x80\x04pickled"):
        file.write_bytes(content)
        with pytest.raises(DrafterError, match=f"^{file} is damaged, or no training state"):
            read_state(file)
    for header in (
        None,
        {"format": "pt"},
        {"state": "{"},
        {"state": "[" * 10**5 + "]" * 10**5},
        {"state": json.dumps({"a": {"tensor": "elsewhere"}})},
    ):
        save_file({"a": torch.zeros(1)}, file, metadata=header)
        with pytest.raises(DrafterError, match="is damaged, or no training state"):
            read_state(file)
