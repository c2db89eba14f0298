"""On disk: complete or absent, and the same after loading, with a training state or without."""

import json
import logging

import numpy as np
import pytest
import torch
from drafter_bits import fingerprint
from safetensors.torch import load, load_file, save_file
from tiny_policy import drafter_of, make_policy, verifier_weights

from verl_tlt.drafter import (
    DrafterError,
    VerifierWeights,
    build_drafter,
    from_drafter_file,
    load_drafter,
    load_training_state,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
)
from verl_tlt.drafter.build import has_own_head
from verl_tlt.drafter.checkpoint import read_state, write_state


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


COPIES = {"a copy": lambda head: head, "cast": lambda head: head.half().float()}
TRAINED = {"trained": lambda head: head + 0.1 * head.std() * torch.randn_like(head)}


@pytest.mark.parametrize(
    ("change", "tied", "ids"),
    [
        ("a copy", True, None), ("a copy", False, [1, 4, 30]), ("cast", False, None), ("trained", False, None),
        ("trained", True, [1, 4, 30]), ("ours", True, None), ("ours", False, [1, 4, 30]),
    ],
)  # fmt: skip
def test_a_head_in_speculators_layout_is_the_drafters_own_where_it_was_trained(tmp_path, change, tied, ids):
    """Until 0.4 `speculators` trained it. What verl-tlt saved is the policy's, if of another RL step."""
    policy = make_policy(tie_word_embeddings=tied)
    policy.save_pretrained(tmp_path / "policy")
    model = drafter_of(policy, draft_ids=None if ids is None else torch.tensor(ids))
    head = (COPIES | TRAINED).get(change, TRAINED["trained"])(model.lm_head.weight)
    theirs = save_drafter(model, tmp_path / "theirs", {}, tensors=serving_tensors(model) | {"lm_head.weight": head})
    if change != "ours":
        (theirs / "provenance.json").unlink()
    newer = verifier_weights(policy).lm_head * 1.5  # by a weight sync
    rows = newer if ids is None else newer[ids]
    own, loaded = change in TRAINED, load_drafter(theirs, tmp_path / "policy")
    for place in ("ours", "again"):
        assert has_own_head(loaded) == own
        refresh_verifier_weights(loaded, VerifierWeights(newer, newer, policy.model.norm.weight))
        assert torch.equal(loaded.lm_head.weight, head if own else rows)
        assert torch.equal(loaded.verifier_lm_head.weight, rows), "its teacher is the policy"
        config, weights = to_drafter_file(loaded, "float32")
        assert bool(json.loads(config).get("own_head")) == own
        assert ("lm_head.weight" in load(weights)) == (own or ids is not None)
        loaded = load_drafter(save_drafter(loaded, tmp_path / place, {}), tmp_path / "policy")


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_an_embedding_that_was_trained_is_told_for_the_policys_is_served(tmp_path, said, factor):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "policy")
    model = drafter_of(policy)
    embedding = {"embed_tokens.weight": verifier_weights(policy).embed * factor}
    theirs = save_drafter(model, tmp_path / "theirs", {}, tensors=serving_tensors(model) | embedding)
    load_drafter(theirs, tmp_path / "policy")
    assert ("has an embedding of its own" in said.text) == (factor != 1.0)


def test_as_one_value_for_the_object_store(drafter, policy, tmp_path):
    config, weights = to_drafter_file(drafter, "bfloat16")
    tensors = load(weights)
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    for loaded in (load_drafter(tmp_path, policy.config), from_drafter_file(config, weights, "eager")):
        assert loaded.fc.weight.dtype == torch.float32
        assert fingerprint(serving_tensors(loaded, torch.bfloat16)) == fingerprint(tensors)


def test_a_failure_in_the_middle_leaves_the_old_one(drafter, saved, policy):
    taken, before = serving_tensors(drafter), load_file(saved / "model.safetensors")["fc.weight"]
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    assert torch.equal(taken["fc.weight"], before), "what was handed out does not change as training goes on"
    with pytest.raises(TypeError):
        save_drafter(drafter, saved, {"not": object()})  # found out after the weights were written
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]
    assert torch.equal(load_drafter(saved, policy.config).fc.weight, before)
    save_drafter(drafter, saved, {"rl_steps": 8})
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]
    assert torch.equal(load_drafter(saved, policy.config).fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("mine", ["actor/model.pt", None])
def test_a_directory_that_holds_anything_else_is_left_as_it_is(drafter, saved, mine):
    """The run's own, say, with the policies' checkpoints, or a policy's."""
    if mine:
        (saved / mine).parent.mkdir(exist_ok=True)
        (saved / mine).write_text("mine")
    else:
        (saved / "provenance.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in saved.parent.rglob("*")}
    with pytest.raises(DrafterError, match=f"={saved} holds, or would hold, something other than a drafter"):
        save_drafter(drafter, saved, {})
    assert {path: path.stat().st_mtime_ns for path in saved.parent.rglob("*")} == before


def test_nan_is_not_saved(policy, tmp_path):
    model = build_drafter(policy.config)  # its head and embedding were never filled
    save_drafter(model, tmp_path / "own", {})
    with pytest.raises(DrafterError, match="NaN"):
        save_drafter(model, tmp_path / "alone", {}, tensors=standalone(model))
    for value, dtype in ((float("inf"), "float32"), (1e5, "float16")):
        with torch.no_grad():
            model.fc.weight[0, 0] = value
        with pytest.raises(DrafterError, match=rf"fc\.weight holds numbers that are not finite as {dtype}"):
            to_drafter_file(model, dtype)
    to_drafter_file(model, "bfloat16")
    with torch.no_grad():
        model.fc.weight[0, 0] = float("inf")
    with pytest.raises(DrafterError, match=r"fc\.weight holds NaN or infinity"):
        save_drafter(model, tmp_path / "infinite", {})
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


def test_a_pickled_state_is_not_read_and_that_is_said(saved, caplog):
    torch.save({"steps": 5}, saved / "training_state.pt")
    with caplog.at_level(logging.WARNING):
        assert load_training_state(saved) is None
    assert f"{saved / 'training_state.pt'} is pickled and not read" in caplog.text


def test_the_served_folder_holds_what_is_served_with_the_permissions_of_other_files(drafter, tmp_path):
    saved = save_drafter(drafter, tmp_path / "drafter", {}, training_state={"steps": 3})
    served = ["config.json", "model.safetensors", "provenance.json"]
    assert sorted(p.name for p in saved.iterdir() if p.is_file()) == served
    files = [file for file in saved.rglob("*") if file.is_file()]
    (tmp_path / "other").touch(0o666)
    assert len(files) == 4 and {file.stat().st_mode for file in files} == {(tmp_path / "other").stat().st_mode}
    assert load_training_state(saved) == {"steps": 3}
    plain = save_drafter(drafter, tmp_path / "plain", {})
    assert load_training_state(plain) is None and sorted(p.name for p in plain.iterdir()) == served


def test_a_training_state_comes_back_to_the_bit(tmp_path):
    state = {
        "parameters": {"fc.weight": torch.randn(3, 4).t(), "half": torch.randn(2).bfloat16()},
        "moments": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4, dtype=torch.int64)}],
        "groups": [{"lr": 1e-3, "fused": None, "amsgrad": False}],
        "rng": np.random.default_rng(5).bit_generator.state, "loss": float("inf"), "name": "tensor", "empty": {},
    }  # fmt: skip
    write_state(state, tmp_path / "s")
    found = read_state(tmp_path / "s")
    assert list(found) == list(state)
    torch.testing.assert_close(found["parameters"], state["parameters"], rtol=0, atol=0)
    torch.testing.assert_close(found["moments"], state["moments"], rtol=0, atol=0)
    rest = ("groups", "rng", "loss", "name", "empty")
    assert [found[key] for key in rest] == [state[key] for key in rest]


def test_what_is_no_training_state_is_named(tmp_path):
    file = tmp_path / "s"
    write_state({"a": torch.zeros(100)}, file)
    contents = [file.read_bytes()[:-4], b"", b"\x80\x04pickled"]
    elsewhere = json.dumps({"a": {"tensor": "elsewhere"}})
    for header in (None, {"format": "pt"}, *({"state": text} for text in ("{", elsewhere))):
        save_file({"a": torch.zeros(1)}, file, metadata=header)
        contents.append(file.read_bytes())
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(DrafterError, match=f"^{file} is damaged, or no training state"):
            read_state(file)
