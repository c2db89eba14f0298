"""The doctor's rules on a recipe: what is refused, what is only said, and that each sentence names its key."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf, open_dict
from policy_config import POLICY, write_policy
from safetensors.numpy import save_file

from verl_tlt import activation
from verl_tlt.checks import rules
from verl_tlt.checks.rules import LAYOUTS_WITHOUT_CAPTURE, examine, examine_packages, judge_version
from verl_tlt.config import DrafterConfig, SpeculationConfig, SpotConfig, TLTConfig, TLTConfigError, TraceConfig
from verl_tlt.drafter.mtp_tensors import head_shapes
from verl_tlt.drafter.policy import policy_shape
from verl_tlt.idle.planner import MODE_RULES
from verl_tlt.upstream.versions import SUPPORTED, installed

DEFAULTS = TLTConfig()
UNTRAINED = TLTConfig(spot=SpotConfig(enable=False), speculation=SpeculationConfig(enable=False))
NO_DRAFTS = TLTConfig(speculation=SpeculationConfig(enable=False))
MTP = TLTConfig(drafter=DrafterConfig(method="mtp"))
ROLLOUT, ACTOR, OF_VERL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model.mtp"
BYPASS = "algorithm.rollout_correction.bypass_mode"


@pytest.fixture
def findings(recipe):
    """Changes the recipe and returns what is found in it, by key; what is ok is left out."""

    def find(changes=None, settings=DEFAULTS):
        with open_dict(recipe):
            for key, value in (changes or {}).items():
                OmegaConf.update(recipe, key, value, force_add=True)
        return {f.what: f for f in examine(recipe, settings) if f.level != "ok"}

    return find


def levels(found):
    for finding in found.values():
        assert finding.sentence.endswith(".") and "\n" not in finding.sentence
    return {what: finding.level for what, finding in found.items()}


def test_a_user_without_an_account_is_told_of_paths_that_need_one(findings, monkeypatch):
    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    assert not findings()  # imports what reads HOME once
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert not findings()
    found = findings({"data.val_files": "~/x.parquet"})
    assert levels(found) == {"data.val_files": "if"}


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"trainer.v1.trainer_mode": "fully_async"}, "trainer.v1.trainer_mode", "fully_async has no TLT trainer"),
        ({"trainer.use_v1": False}, "trainer.use_v1", "legacy trainer"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 4}, "trainer.n_gpus_per_node",
         "ask for 4 GPUs a replica, and trainer.nnodes and trainer.n_gpus_per_node give 2"),
        ({"rollout": {"nnodes": 1, "n_gpus_per_node": 4}}, "rollout", "experimental trainers"),
        ({"trainer.device": "npu"}, "trainer.device", "needs CUDA or ROCm"),
        ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name", "works with vllm only"),
        ({f"{ROLLOUT}.disaggregation": {"enabled": True}}, f"{ROLLOUT}.disaggregation", "prefill and decode"),
        ({f"{ROLLOUT}.checkpoint_engine": {"backend": "delta_sharded"}}, f"{ROLLOUT}.checkpoint_engine.backend",
         "delta_sharded is not supported"),
        ({f"{ROLLOUT}.checkpoint_engine": {"backend": "naive"}, "trainer.v1.trainer_mode": "separate_async"},
         f"{ROLLOUT}.checkpoint_engine.backend", "set another, such as nccl"),
        ({f"{ROLLOUT}.data_parallel_size": 2, "trainer.n_gpus_per_node": 4}, f"{ROLLOUT}.data_parallel_size",
         "use more replicas"),
        ({f"{ROLLOUT}.quantization": "fp8"}, f"{ROLLOUT}.quantization", "quantization=fp8 is not supported with"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.quantization": "fp8"}, f"{ROLLOUT}.engine_kwargs.vllm.quantization",
         "quantization=fp8 is not supported with"),
        ({f"{ACTOR}.fsdp_config.qat.enable": True}, f"{ACTOR}.fsdp_config.qat.enable", "the engine has quantized ones"),
        ({"actor_rollout_ref.model.mtp": {"enable": True, "enable_rollout": True}},
         "actor_rollout_ref.model.mtp.enable_rollout", "set tlt.drafter.method=mtp, and TLT chooses K for it"),
    ],
)  # fmt: skip
def test_each_impossible_recipe_is_refused_for_that_one_reason(findings, changes, what, said):
    found = findings(changes)
    assert levels(found) == {what: "refuse"} and said in found[what].sentence


@pytest.mark.parametrize("changes", [
    {}, {"rollout": {"n": 8}}, {f"{ACTOR}.strategy": "megatron"},
    *({f"{ACTOR}.megatron.{name}": True} for name in LAYOUTS_WITHOUT_CAPTURE),
    *({"trainer.v1.trainer_mode": f"{prefix}{mode}"} for mode in MODE_RULES for prefix in ("", "tlt_")),
])  # fmt: skip
def test_what_is_possible_or_has_no_effect_is_no_reason(findings, changes):
    assert levels(findings(changes)) == {}


@pytest.mark.parametrize(
    ("changes", "settings", "key", "said"),
    [
        ({f"{ACTOR}.strategy": "veomni"}, UNTRAINED, f"{ACTOR}.strategy", "random"),
        ({BYPASS: True}, UNTRAINED, BYPASS, "random"),
        *(({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.{name}": True}, UNTRAINED, f"{ACTOR}.megatron.{name}",
           "as it is loaded") for name in LAYOUTS_WITHOUT_CAPTURE),
        ({f"{ROLLOUT}.full_determinism": True}, NO_DRAFTS, f"{ROLLOUT}.full_determinism", "follow measured times"),
    ],
)  # fmt: skip
def test_what_works_in_part_is_a_warning_unless_the_other_part_is_not_wanted(findings, changes, settings, key, said):
    found = findings(changes)
    assert levels(found) == {key: "warn"} and said in found[key].sentence
    assert levels(findings({}, settings)) == {}


def test_where_a_drafter_is_only_trained_it_is_told_that_it_cannot_be(findings):
    found = findings({BYPASS: True}, NO_DRAFTS)
    assert levels(found) == {BYPASS: "warn"} and "nothing is trained" in found[BYPASS].sentence


@pytest.mark.parametrize("changes", [{f"{ACTOR}.strategy": "veomni"}, {"trainer.n_gpus_per_node": 1}])
def test_where_ngrams_draft_nothing_is_said_of_a_drafter(findings, changes):
    assert findings(changes, TLTConfig(speculation=SpeculationConfig(source="ngram"))) == {}


def test_megatrons_vision_language_policies_are_not_captured(findings, recipe):
    path = Path(recipe.actor_rollout_ref.model.path, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": {"depth": 1}}))
    assert not findings()
    found = findings({f"{ACTOR}.strategy": "megatron"})
    assert levels(found) == {f"{ACTOR}.strategy": "warn"} and "takes images" in found[f"{ACTOR}.strategy"].sentence


def test_a_drafter_that_is_neither_given_nor_trained_is_a_warning(findings):
    found = findings({}, TLTConfig(spot=SpotConfig(enable=False)))
    assert levels(found) == {"tlt.spot.enable": "warn"} and "it is random" in found["tlt.spot.enable"].sentence


PARTS = {
    "model.embed_tokens.weight": np.zeros((64, 64), np.float32), "lm_head.weight": np.zeros((64, 64), np.float32),
    "model.norm.weight": np.zeros(64, np.float32),
}  # fmt: skip
"""What a drafter takes of the policy."""


@pytest.fixture
def mimo(recipe):
    """The recipe's policy is one with an MTP head in its checkpoint."""
    policy = Path(recipe.actor_rollout_ref.model.path)
    more = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (policy / "config.json").write_text(json.dumps({**POLICY, **more}))
    head = {name: np.zeros(size, np.float32) for name, size in head_shapes(policy_shape(policy)).items()}
    save_file({**PARTS, **head}, policy / "model.safetensors")
    return policy


def test_an_mtp_head_drafts_where_the_checkpoint_holds_one(findings, mimo):
    assert levels(findings({}, MTP)) == {}
    save_file(PARTS, mimo / "model.safetensors")
    found = findings({}, MTP)
    assert levels(found) == {"tlt.drafter.method": "refuse"}
    assert "holds no MTP head" in found["tlt.drafter.method"].sentence


@pytest.mark.parametrize(
    ("verls", "strategy", "found", "said"),
    [
        ({"enable_rollout": True}, "fsdp2", {}, ""),
        ({"enable_train": True}, "fsdp2", {f"{OF_VERL}.enable_train": "refuse"}, "trains with Megatron only"),
        ({"enable_train": True}, "megatron", {f"{OF_VERL}.enable_rollout": "refuse"}, "must be True beside"),
        ({"enable_train": True, "enable_rollout": True}, "megatron", {f"{OF_VERL}.enable_train": "warn"},
         "verl trains the MTP head and sends it with every weight sync; TLT chooses draft lengths"),
    ],
)  # fmt: skip
def test_beside_verls_own_mtp_one_of_the_two_trains_the_head(findings, mimo, recipe, verls, strategy, found, said):
    seen = findings({OF_VERL: {"enable": True, **verls}, f"{ACTOR}.strategy": strategy}, MTP)
    refused = {what: finding for what, finding in seen.items() if finding.level == "refuse"} or seen
    assert levels(refused) == found and all(said in finding.sentence for finding in refused.values())
    assert activation.resolve(recipe, MTP).spot.enable is not bool(verls.get("enable_train"))


@pytest.mark.parametrize(
    ("mode", "devices", "tensor_parallel"),
    [("sync", (1, 1), 1), ("colocate_async", (2, 8), 16), ("separate_async", (2, 8), 16)],
)
def test_one_replica_alone_warns_that_nothing_will_ever_be_idle(findings, mode, devices, tensor_parallel):
    changes = {
        "trainer.v1.trainer_mode": mode, "trainer.nnodes": devices[0], "trainer.n_gpus_per_node": devices[1],
        f"{ROLLOUT}.tensor_model_parallel_size": tensor_parallel,
    }  # fmt: skip
    assert levels(findings(changes)) == ({} if mode == "separate_async" else {"trainer.n_gpus_per_node": "warn"})
    assert levels(findings({}, UNTRAINED)) == {}
    assert levels(findings({f"{ROLLOUT}.tensor_model_parallel_size": 1, "trainer.n_gpus_per_node": 2})) == {}


def test_backends_of_the_modes_that_verl_starts_are_taken(findings):
    for mode, backend in (("sync", "naive"), ("colocate_async", "naive"), ("separate_async", "nccl")):
        changes = {f"{ROLLOUT}.checkpoint_engine.backend": backend, "trainer.v1.trainer_mode": mode}
        assert levels(findings(changes)) == {}


def test_what_does_not_go_with_drafts_is_known_before_ray_starts_and_goes_without(findings):
    pytest.importorskip("vllm")
    key, stages = (f"{ROLLOUT}.engine_kwargs.vllm.{name}_parallel_size" for name in ("data", "pipeline"))
    changes = {key: 4, stages: 2, f"{ROLLOUT}.quantization": "fp8"}
    found = findings({**changes, f"{ROLLOUT}.engine_kwargs.vllm.scheduler_cls": "a.B"})
    assert "use more replicas" in found[key].sentence and "=2 is not supported: in a pip" in found[stages].sentence
    assert "vllm.scheduler_cls is set by verl-tlt itself" in found[f"{ROLLOUT}.engine_kwargs"].sentence
    assert levels(findings({}, NO_DRAFTS)) == {}


@pytest.mark.parametrize(
    ("policy", "said"), [("nowhere:Rule", "No module named 'nowhere'"), ("collections:deque", "is no verl_tlt.spec")]
)
def test_a_policy_of_ones_own_that_cannot_be_used_is_known_before_ray_starts(findings, policy, said):
    key = "tlt.speculation.policy"
    found = findings({}, TLTConfig(speculation=SpeculationConfig(policy=policy)))
    assert levels(found) == {key: "if"} and f"{key}={policy}" in found[key].sentence and said in found[key].sentence
    assert not findings({}, TLTConfig(speculation=SpeculationConfig(policy=policy, enable=False)))
    assert not findings({}, TLTConfig(speculation=SpeculationConfig(policy="examples.custom_policy:LongTail")))


@pytest.mark.parametrize("vllm", ["0.30.0", "0.31.0", "0.32.0"])
@pytest.mark.parametrize("key", ["enable_rollout_routing_replay", "engine_kwargs.vllm.enable_return_routed_experts"])
def test_routes_of_experts_are_refused_where_vllm_has_them_on_the_other_runner(findings, monkeypatch, vllm, key):
    monkeypatch.setattr("verl_tlt.checks.rules.installed", lambda name: vllm if name == "vllm" else installed(name))
    wanted = {f"{ROLLOUT}.{key}": "refuse"} if vllm == "0.31.0" else {}
    assert levels(findings({f"{ROLLOUT}.{key}": True})) == wanted
    assert not findings({}, NO_DRAFTS)


@pytest.mark.parametrize(("vllm", "refused"), [("0.24.0", True), ("0.28.0", False)])
def test_routes_beside_an_mtp_head_are_refused_where_vllm_may_take_the_heads(findings, monkeypatch, vllm, refused):
    monkeypatch.setattr("verl_tlt.checks.rules.installed", lambda name: vllm if name == "vllm" else installed(name))
    key = f"{ROLLOUT}.enable_rollout_routing_replay"
    assert (key in findings({key: True}, MTP)) == refused


def test_a_hybrid_policy_goes_without_prefix_caching_and_what_was_not_tried_is_refused(findings, tmp_path):
    from transformers import Qwen3NextConfig

    fields = Qwen3NextConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4).to_dict()
    policy = write_policy(tmp_path / "hybrid", **fields | {"architectures": ["Qwen3NextForCausalLM"]})
    changes = {"actor_rollout_ref.model.path": str(policy)}
    key = f"{ROLLOUT}.enable_prefix_caching"
    found = findings(changes | {key: True})
    longest = "tlt.speculation.max_draft_length"
    assert levels(found) == {key: "warn", longest: "warn"} and f"{key} is turned off" in found[key].sentence
    assert f"with {longest}=3 a request of this hybrid policy takes 4 recurrent states" in found[longest].sentence
    assert levels(findings(changes | {key: False})) == {longest: "warn"}
    asked = f"{ROLLOUT}.engine_kwargs"
    found = findings(changes | {key: False, f"{asked}.vllm.async_scheduling": True})
    assert levels(found) == {asked: "refuse", longest: "warn"}
    assert "not possible with a hybrid policy" in found[asked].sentence
    five = TLTConfig(speculation=SpeculationConfig(max_draft_length=5))
    for eager, states in ((None, 4), (True, 6)):  # verl leaves nulls out, and FULL graphs are for 3 and 7
        found = findings({f"{asked}.vllm.enforce_eager": eager}, five)
        assert f"takes {states} recurrent states" in found[longest].sentence


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("text_config", {"text_config": "abc"}),
        ("architectures", {"architectures": "abc"}),
        ("layer_types", {"text_config": {"layer_types": [1]}}),
    ],
)
def test_fields_of_a_policy_that_are_of_another_kind_are_named(findings, recipe, tmp_path, field, wrong):
    fields = json.loads(Path(recipe.actor_rollout_ref.model.path, "config.json").read_text()) | wrong
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = findings({"actor_rollout_ref.model.path": str(tmp_path)})
    assert f"config.json: {field} must be " in found["actor_rollout_ref.model.path"].sentence


def test_data_files_may_be_one_several_a_glob_or_remote(findings, tmp_path):
    files = [str(tmp_path / "*.parquet"), "hdfs://far/away.parquet", str(tmp_path / "absent.parquet")]
    found = findings({"data.train_files": files, "data.val_files": str(tmp_path / "no" / "*.parquet")})
    assert levels(found) == {"data.train_files": "if", "data.val_files": "if"}
    assert found["data.train_files"].sentence == f"data.train_files={files[2]} does not exist on this machine."
    assert levels(findings({"data.custom_cls.path": "mine.py"})) == {}, "a custom dataset reads what it likes"


def test_a_ray_client_driver_looks_at_no_file(findings, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    settings = TLTConfig(drafter=DrafterConfig(path="/only/there"))
    found = findings({"data.train_files": "/only/on/the/cluster.parquet"}, settings)
    assert levels(found) == {"ray_init.address": "warn"}


def test_a_relative_folder_of_checkpoints_is_another_one_on_a_cluster(findings, monkeypatch):
    key = "trainer.default_local_dir"
    assert levels(findings({key: "checkpoints/a/b"})) == {}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = findings()
    assert levels(found) == {key: "warn"} and "give an absolute path" in found[key].sentence
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert levels(findings()) == {key: "warn", "ray_init.address": "warn"}
    assert key not in findings({key: "/shared/run"})


def test_a_drafter_that_cannot_be_is_known_before_ray_starts(findings):
    found = findings({}, TLTConfig(drafter=DrafterConfig(vocab=10**6)))["tlt.drafter.path"]
    assert found.level == "refuse" and found.sentence.startswith("tlt.drafter.vocab must be 2..")
    found = findings({}, TLTConfig(drafter=DrafterConfig(path="/nowhere/drafter")))["tlt.drafter.path"]
    said = "tlt.drafter.path=/nowhere/drafter is not a directory on this machine."
    assert (found.level, found.sentence) == ("if", said)


def test_folders_that_could_not_be_written_at_the_end_are_known_at_the_start(findings, tmp_path):
    (tmp_path / "mine.txt").touch()
    said = {}
    for key, settings in {
        "tlt.drafter.save_dir": TLTConfig(drafter=DrafterConfig(save_dir=str(tmp_path))),
        "tlt.trace.dir": TLTConfig(trace=TraceConfig(dir=str(tmp_path / "mine.txt"))),
    }.items():
        said[key] = findings({}, settings)[key]
        assert said[key].level == "refuse" and key in said[key].sentence
    assert "mine.txt is not a folder" in said["tlt.trace.dir"].sentence
    assert not findings({}, TLTConfig(drafter=DrafterConfig(save_dir=str(tmp_path / "new"))))
    (tmp_path / "tlt_drafter").mkdir()
    (tmp_path / "tlt_drafter" / "LICENSE").touch()
    found = findings({"trainer.default_local_dir": str(tmp_path)})
    assert found["tlt.drafter.save_dir"].level == "refuse", "the default one"


def test_an_unresolvable_key_is_named(findings):
    with pytest.raises(TLTConfigError, match=f"{ROLLOUT}.name cannot be read"):
        findings({f"{ROLLOUT}.name": "${no.such.key}"})


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("verl", "0.9.1", "ok"), ("verl", "0.9.0", "refuse"), ("verl", "0.10.0.dev", "refuse"),
        ("verl", None, "refuse"), ("verl", "unknown", "refuse"), ("vllm", "0.28.0+cpu", "ok"), ("vllm", "0.31", "ok"),
        ("vllm", "0.23.1", "refuse"), ("speculators", "0.10.0", "refuse"),
    ],
)  # fmt: skip
def test_versions(name, version, level):
    supported = {s.name: s for s in SUPPORTED}[name]
    finding = judge_version(supported, version)
    assert (finding.level, finding.what) == (level, name)
    assert name in finding.sentence and (version or "not installed") in finding.sentence
    assert level == "ok" or supported.remedy in finding.sentence


def test_a_release_that_was_not_tested_runs_with_one_warning_where_the_user_says_so(monkeypatch):
    vllm = next(s for s in SUPPORTED if s.name == "vllm")
    refused = judge_version(vllm, "0.32.0")
    assert refused.level == "refuse" and "tested with vllm 0.24 to 0.31" in refused.sentence
    assert "TLT_UNTESTED=1" in refused.sentence
    monkeypatch.setenv("TLT_UNTESTED", "1")
    assert judge_version(vllm, "0.32.0").level == "warn"
    assert judge_version(vllm, None).level == "refuse", "what is not there cannot be tried"


def test_what_verl_itself_lacks_is_named(monkeypatch):
    assert [finding.what for finding in examine_packages()] == [s.name for s in SUPPORTED]
    monkeypatch.setattr(rules, "installed", lambda name: None if name == "transfer_queue" else "0.9.1")
    lacks = examine_packages()[-1]
    assert lacks.level == "refuse" and "transfer_queue is not installed here" in lacks.sentence


def test_a_distribution_without_its_module_is_not_installed(tmp_path, monkeypatch):
    info = tmp_path / "tlt_ghost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tlt_ghost\nVersion: 1.0\n")
    (tmp_path / "tlt_anonymous.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("tlt_ghost") is None and installed("tlt_anonymous") == "unknown"
