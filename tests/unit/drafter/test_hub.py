"""A model by its name on the hub: found in the local cache or fetched, or one sentence that says why not."""

from pathlib import Path

import pytest
import torch
from tiny_policy import verifier_weights

from verl_tlt.config import TLTConfig
from verl_tlt.drafter.check import check_drafter
from verl_tlt.drafter.checkpoint import load_drafter, provenance, save_drafter
from verl_tlt.drafter.model_files import NotHereError, folder, is_name
from verl_tlt.drafter.policy import policy_shape
from verl_tlt.drafter.verifier import VerifierWeights, refresh_verifier_weights
from verl_tlt.trainer.run_setup import first_drafter


@pytest.mark.parametrize(
    ("model", "expected"),
    [("Qwen/Qwen3-8B", True), ("org/my.model_2", True), ("/models/a", False), ("~/a", False), ("folder", False),
     ("hdfs://a/b", False), (Path("Org/name"), True),
     *((out, False) for out in ("../secret", "Org/..", "Org/a/b", ".Org/x", "Org/x\n"))],
)  # fmt: skip
def test_what_can_only_be_a_name_and_no_name_leads_out_of_the_cache(model, expected):
    assert is_name(model) is expected


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_name("org/name") and folder("org/name", ("config.json",)) == Path("org/name")
    assert folder("/nowhere/at/all", ("config.json",)) == Path("/nowhere/at/all")  # whoever opens a file says so


def test_policy_and_drafter_are_read_from_the_cache(cache, policy, policy_dir, drafter, tmp_path):
    refresh_verifier_weights(drafter, verifier_weights(policy))
    saved = save_drafter(drafter, tmp_path / "drafter", {"acceptance": [0.5]})
    policy_name, drafter_name = cache("Org/policy", policy_dir), cache("Org/drafter", saved)
    assert policy_shape(policy_name).vocab_size == 48
    assert torch.equal(VerifierWeights.from_policy_dir(policy_name).lm_head, policy.lm_head.weight)
    check_drafter(drafter_name, policy_name)
    assert torch.equal(load_drafter(drafter_name, policy_name).fc.weight, drafter.fc.weight)
    assert provenance(drafter_name)["acceptance"] == [0.5]
    config = TLTConfig.from_dict({"drafter": {"path": drafter_name}})
    start = first_drafter(config, policy_name, "float32", 100, resume_from=None)
    assert start.origin == drafter_name and start.served.acceptance == (0.5,)


def test_a_file_that_is_not_here_is_named(cache, policy_dir):
    """The hub is not said to lack it: it was not asked, as after a config's download on a login node."""
    name = cache("Org/policy", policy_dir)
    with pytest.raises(NotHereError, match=r"weights\.bin is not in the local cache"):
        folder(name, ("weights.bin",), fetch=False)
    with pytest.raises(NotHereError, match=r"^Org/policy: weights\.bin is not here, .*HF_HUB_OFFLINE is set\.$"):
        folder(name, ("weights.bin",))


def test_weights_without_a_config_are_no_refusal_without_a_hub(cache, policy_dir, saved):
    """Another node may have it, so the doctor warns."""
    (saved / "config.json").unlink()
    name = cache("Org/drafter", saved)
    with pytest.raises(NotHereError, match=r"^Org/drafter: config\.json is not in the local cache, and could not be"):
        check_drafter(name, policy_dir)
