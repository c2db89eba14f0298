"""What the doctor finds out about a policy and a drafter, by folder and by name."""

import io
import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from rich.console import Console

from verl_tlt.checks.models import check_policy, check_recipe_drafter
from verl_tlt.commands.console import say
from verl_tlt.config import TLTConfig


def judged(policy, path, **settings):
    """What is found of a drafter for a policy."""
    return check_recipe_drafter(TLTConfig.from_dict({"drafter": {"path": str(path), **settings}}), str(policy), 192)


@pytest.fixture
def cached(policy, cache, tmp_path):
    """Puts the policy's config, changed, into the Hugging Face cache under a name, from a folder of that name."""
    config = json.loads(Path(policy, "config.json").read_text())

    def put(name, **changes):
        place = tmp_path / "cached" / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config | changes))
        return cache(name, place)

    return put


def test_a_name_is_resolved_or_that_it_cannot_be_is_said_and_no_refusal(cached, policy):
    for fine in (check_policy(policy), check_policy(cached("Org/policy"))):
        assert fine.level == "ok" and "is a qwen3 model" in fine.sentence
    found = check_policy("Org/absent")
    assert found.level == "warn" and "HF_HUB_OFFLINE is set, so the family of actor_rollout_ref" in found.sentence
    assert "another file system" in check_policy("hdfs://cluster/policy").sentence


def test_a_drafter_on_another_file_system_is_refused(policy):
    """verl copies a policy from there, and nobody a drafter."""
    for of in (policy, "hdfs://nn/policy"):
        found = judged(of, "hdfs://nn/drafter")
        assert (found.level, found.what) == ("refuse", "tlt.drafter.path")
        assert found.sentence.startswith("tlt.drafter.path=hdfs://nn/drafter is on another file system: copy it")


def test_a_name_that_the_hub_does_not_have_is_told(monkeypatch):
    def absent(name, **_):
        raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    found = check_policy("Org/absent")
    assert found.level == "warn", "it may be private, and another node may read it"
    assert "Org/absent is no folder here, and no model on the hub that you may read" in found.sentence


def test_a_file_or_a_relative_folder_that_is_not_there_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dr").mkdir()
    (tmp_path / "dr" / "model.safetensors").touch()
    found = check_policy("dr/model.safetensors")
    assert found.level == "if" and "is not a directory" in found.sentence, "another machine may have it"
    assert f"({tmp_path}/my/own/policy)" in check_policy("my/own/policy").sentence


MLA = "latent attention (MLA) does not start on vLLM's CPU backend"


@pytest.mark.parametrize(
    ("family", "architecture", "said", "fields"),
    [
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "does not read its experts as transformers 5", {}),
        ("mimo", "MiMoForCausalLM", "to no EAGLE-3 head; its own MTP head drafts with tlt.drafter.method=mtp", {}),
        ("martian", None, "drafters exist for llama, qwen2", {}),
        ("deepseek_v3", "DeepseekV3ForCausalLM", re.escape(MLA), {"kv_lora_rank": 512}),
        ("kimi_k25", "KimiK25ForConditionalGeneration", re.escape(MLA), {"text_config": {"kv_lora_rank": 512}}),
    ],
)
def test_another_family_is_refused_with_the_reason(cached, family, architecture, said, fields):
    changes = {"model_type": family, "architectures": architecture and [architecture], **fields}
    found = check_policy(cached("Org/policy", **changes))
    begin = re.escape(f"actor_rollout_ref.model.path=Org/policy is a {family} model, and ")
    assert found.level == "refuse" and re.fullmatch(rf"{begin}.*{said}.*\.", found.sentence), found.sentence


@pytest.mark.parametrize(
    ("experts", "each", "said"),
    [
        ("num_experts", 2, "names Glm4MoeForCausalLM, and method=mtp drafts for MiMoForCausalLM"),
        ("num_experts", 5, "num_experts_per_tok=5 of 4 experts"),
        ("n_routed_experts", 5, "num_experts_per_tok=5 of 4 experts"),
    ],
)
def test_an_mtp_head_of_another_family_is_refused_for_what_it_is(cached, experts, each, said):
    changes = {experts: 4, "num_experts_per_tok": each, "moe_intermediate_size": 8}
    policy = cached("Org/policy", model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], **changes)
    assert said in check_policy(policy, "mtp").sentence


def drafter_at(path, policy, **changes):
    """A config that fits; no weights."""
    layer = json.loads(Path(policy, "config.json").read_text())
    layer |= {"num_hidden_layers": 1, "model_type": "llama"} | changes
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_drafter_on_the_hub_is_judged_by_its_config_until_its_weights_are_here(cached, policy, tmp_path):
    cached("Org/drafter")
    place = drafter_at(tmp_path / "cached" / "Org" / "drafter", policy)
    found = judged(policy, "Org/drafter")
    later = "fits by its config; its weights are fetched when the run starts, and were not checked."
    assert (found.level, found.sentence) == ("warn", f"tlt.drafter.path=Org/drafter {later}")
    drafter_at(place, policy, hidden_size=32)
    assert "hidden_size=32, but the policy's is 64" in judged(policy, "Org/drafter").sentence
    drafter_at(place, policy)
    (place / "model.safetensors").write_bytes(b"cut off")
    found = judged(policy, "Org/drafter")
    assert found.level == "refuse" and "model.safetensors is not a complete safetensors file" in found.sentence


@pytest.mark.parametrize("there", [True, False], ids=["policy here", "policy elsewhere"])
def test_what_is_no_eagle3_head_is_refused_whether_or_not_the_policy_is_here(cached, policy, tmp_path, there):
    asked, config = policy if there else "Org/absent", json.loads(Path(policy, "config.json").read_text())
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "config.json"
    changes = ({}, {"speculators_model_type": "eagle"}, {"draft_vocab_size": 8, "architectures": 3}, {"hidden_size": 0})
    for other in changes:
        file.write_text(json.dumps(config | other))
        found = judged(asked, file.parent)
        assert found.level == "refuse" and str(file) in found.sentence, found
    found = judged(asked, "Org/no-such-drafter")
    assert found.level == "warn" and found.sentence.endswith("so whether tlt.drafter.path fits was not checked.")
    assert "HF_HUB_OFFLINE" in found.sentence


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A policy, and drafters for it by their method."""
    from mtp_policy import make_mtp_policy

    from verl_tlt.drafter import build_drafter, load_own_head, save_drafter

    place = tmp_path_factory.mktemp("heads")
    make_mtp_policy(place / "policy", "qwen3_5")
    for method, model in (("eagle3", build_drafter(place / "policy")), ("mtp", load_own_head(*[place / "policy"] * 2))):
        save_drafter(model, place / method, {})
    return place


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("there", ["all", "no policy", "no weights"])
def test_a_drafter_for_another_method_is_refused_wherever_its_config_can_be_read(cached, heads, tmp_path, kind, there):
    policy = "Org/absent" if there == "no policy" else str(heads / "policy")
    path, levels = str(heads / kind), {}
    if there == "no weights":
        path = cached("Org/drafter")
        shutil.copy(heads / kind / "config.json", tmp_path / "cached" / "Org" / "drafter")
    for method in ("eagle3", "mtp"):
        found = judged(policy, path, method=method)
        levels[method] = found.level
        if method != kind:
            assert found.sentence.endswith(f"{path} holds a drafter for tlt.drafter.method={kind}, not {method}.")
        elif there == "no policy":
            assert f"{path} is a drafter for tlt.drafter.method={kind}; whether it fits was not" in found.sentence
    assert levels.pop(kind) == ("ok" if there == "all" else "warn") and list(levels.values()) == ["refuse"]


def test_a_name_with_codes_of_a_terminal_is_quoted(policy):
    name = "models/\x1b[31mred\x07"
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    for finding in (check_policy(name), judged(policy, name)):
        say(console, finding.sentence)
    shown = console.file.getvalue()
    assert "\x1b" not in shown and "\x07" not in shown and shown.count(r"\x1b[31mred\x07") == 4
