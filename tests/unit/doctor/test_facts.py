"""Reading facts off a config and a disk."""

import json
from dataclasses import replace

import pytest
from omegaconf import open_dict

from verl_tlt.compat.versions import installed
from verl_tlt.config import DrafterConfig, SpeculationConfig, TLTConfig, TLTConfigError
from verl_tlt.doctor.facts import RecipeFacts, read_environment, read_recipe, read_settings
from verl_tlt.doctor.rules import UNTAPPED_LAYOUTS

DEFAULTS = TLTConfig()


def test_a_good_recipe_reads_as_a_good_run(recipe):
    assert read_recipe(recipe, DEFAULTS) == RecipeFacts()


def test_the_mode_is_read_the_same_before_and_after_activation(recipe):
    recipe.trainer.v1.trainer_mode = "tlt_sync"
    assert read_recipe(recipe, DEFAULTS).trainer_mode == "sync"


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("actor_rollout_ref.rollout.min_p", 0.05, "refused_sampling", ("actor_rollout_ref.rollout.min_p",)),
        (
            "actor_rollout_ref.rollout.val_kwargs.logit_bias",
            {3: -1.0},
            "refused_sampling",
            ("actor_rollout_ref.rollout.val_kwargs.logit_bias",),
        ),
        ("actor_rollout_ref.rollout.min_p", 0.0, "refused_sampling", ()),
        ("actor_rollout_ref.rollout.data_parallel_size", 4, "data_parallel", 4),
        ("actor_rollout_ref.rollout.disaggregation", {"enabled": True}, "disaggregation", True),
        ("async_training", {"x": 1}, "other_trainer", "async_training"),
        ("trainer.use_v1", False, "use_v1", False),
        *(
            (f"actor_rollout_ref.actor.megatron.{name}", on, "megatron", (name,) if on else ())
            for name in UNTAPPED_LAYOUTS
            for on in (True, False)
        ),
        ("actor_rollout_ref.rollout.quantization", "fp8", "quantized_by", "actor_rollout_ref.rollout.quantization=fp8"),
        (
            "actor_rollout_ref.actor.fsdp_config.qat.enable",
            True,
            "quantized_by",
            "actor_rollout_ref.actor.fsdp_config.qat.enable=True",
        ),
    ],
)
def test_keys(recipe, key, value, field, expected):
    from omegaconf import OmegaConf

    with open_dict(recipe):
        OmegaConf.update(recipe, key, value, force_add=True)
    assert getattr(read_recipe(recipe, DEFAULTS), field) == expected


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("speculative_config", {"method": "ngram"}, "vllm.speculative_config is set by verl-tlt itself"),
        ("data_parallel_size", 4, "vllm.data_parallel_size must be 1"),
        ("logits_processors", ["a:B"], "vllm.logits_processors cannot be used with a drafter"),
        ("kv_transfer_config", {"kv_role": "kv_both"}, "vllm.kv_transfer_config"),
    ],
)
def test_what_the_engines_would_refuse_is_known_before_ray_starts(recipe, key, value, sentence):
    pytest.importorskip("vllm")
    with open_dict(recipe):
        recipe.actor_rollout_ref.rollout.engine_kwargs.vllm[key] = value
    (problem,) = read_recipe(recipe, DEFAULTS).engine_problems
    assert sentence in problem
    assert read_recipe(recipe, TLTConfig(speculation=SpeculationConfig(enable=False))).engine_problems == ()


def test_a_fixed_length_without_graphs_is_known_before_ray_starts(recipe):
    pytest.importorskip("vllm")
    settings = TLTConfig(speculation=SpeculationConfig(policy="fixed", fixed=2))
    assert "fixed=2 is none of the engine's draft lengths [0, 1, 3]" in read_recipe(recipe, settings).engine_problems[0]
    with open_dict(recipe):
        recipe.actor_rollout_ref.rollout.enforce_eager = True
    assert read_recipe(recipe, settings).engine_problems == ()


def test_an_installed_logits_processor_that_vllm_would_leave_out_is_named(recipe, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    info = tmp_path / "censor-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: censor\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\ncensor = censor.core:Censor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = read_recipe(recipe, DEFAULTS).engine_problems
    assert "censor.core:Censor would silently do nothing" in problem


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((1, 2), "tlt.drafter.aux_layers must be 3 ascending distinct layers"),
        ((1, 3, 6), r"tlt.drafter.aux_layers=[1, 3, 6] is outside 0..5"),
    ],
)
def test_aux_layers_the_policy_does_not_have_are_known_before_ray_starts(recipe, layers, sentence):
    settings = TLTConfig(drafter=DrafterConfig(aux_layers=layers))
    assert read_recipe(recipe, settings).drafter.problem.startswith(sentence)
    assert read_recipe(recipe, DEFAULTS).drafter.problem is None


@pytest.mark.parametrize(
    ("devices", "tensor_parallel", "replicas"), [((1, 8), 2, 4), ((2, 8), 16, 1), ((1, 1), 1, 1), ((1, 2), 4, 0)]
)
def test_replicas_are_counted_as_verl_does(recipe, devices, tensor_parallel, replicas):
    recipe.trainer.nnodes, recipe.trainer.n_gpus_per_node = devices
    recipe.actor_rollout_ref.rollout.tensor_model_parallel_size = tensor_parallel
    assert read_recipe(recipe, DEFAULTS).replicas == replicas


def test_data_files_may_be_one_several_a_glob_or_remote(recipe, tmp_path):
    recipe.data.train_files = [str(tmp_path / "*.parquet"), "hdfs://far/away.parquet", str(tmp_path / "absent.parquet")]
    recipe.data.val_files = str(tmp_path / "no" / "*.parquet")
    assert read_recipe(recipe, DEFAULTS).missing_data == (
        ("data.train_files", str(tmp_path / "absent.parquet")),
        ("data.val_files", str(tmp_path / "no" / "*.parquet")),
    )


def test_a_custom_dataset_reads_what_it_likes(recipe):
    recipe.data.train_files = "not-a-path"
    recipe.data.custom_cls.path = "mine.py"
    assert read_recipe(recipe, DEFAULTS).missing_data == ()


def test_policy_problems_name_the_key(recipe, tmp_path):
    def problem(path):
        recipe.actor_rollout_ref.model.path = str(path)
        return read_recipe(recipe, DEFAULTS).policy.problem

    assert "is not a directory" in problem("/nowhere/policy")
    assert "is not a directory" in problem("models/not/here")
    (tmp_path / "empty").mkdir()
    assert "config.json" in problem(tmp_path / "empty")
    assert problem("hdfs://cluster/policy") is None and problem("Qwen/Qwen2.5-7B") is None
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    assert "is a gpt_oss model" in problem(tmp_path / "empty")


def test_a_drafter_that_is_not_there(recipe):
    settings = TLTConfig(drafter=DrafterConfig(path="/nowhere/drafter"))
    problem = read_recipe(recipe, settings).drafter.problem
    assert problem == "tlt.drafter.path=/nowhere/drafter is not a directory on this machine."


@pytest.mark.parametrize(
    ("field", "value", "named"), [("hidden_size", 32, "hidden_size=32"), ("vocab_size", 99, "vocab_size=99")]
)
def test_a_drafter_of_another_policy_names_file_and_field(recipe, tmp_path, field, value, named):
    policy = json.loads((tmp_path / "policy" / "config.json").read_text())
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    layer = policy | {"num_hidden_layers": 1, field: value}
    (drafter / "config.json").write_text(
        json.dumps({"speculators_model_type": "eagle3", "transformer_layer_config": layer})
    )
    problem = read_recipe(recipe, TLTConfig(drafter=DrafterConfig(path=str(drafter)))).drafter.problem
    assert problem.startswith("tlt.drafter.path: ") and str(drafter / "config.json") in problem and named in problem


def test_a_ray_client_driver_looks_at_no_file(recipe, monkeypatch):
    recipe.data.train_files = "/only/on/the/cluster.parquet"
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    run = read_recipe(recipe, TLTConfig(drafter=DrafterConfig(path="/only/there")))
    assert run.remote_driver and run.missing_data == () and run.drafter.problem is None


def test_an_unresolvable_key_is_named(recipe):
    recipe.actor_rollout_ref.rollout.name = "${no.such.key}"
    with pytest.raises(TLTConfigError, match=r"actor_rollout_ref\.rollout\.name cannot be read"):
        read_recipe(recipe, DEFAULTS)


@pytest.mark.parametrize(
    ("rollout", "tlt", "longest"),
    [
        ({}, {}, 7),
        ({"enforce_eager": True}, {}, 3),
        ({"engine_kwargs": {"vllm": {"enforce_eager": True}}}, {}, 3),
        ({"enforce_eager": True}, {"max_draft_length": 5}, 5),
        ({}, {"max_draft_length": None, "arms": [0, 7]}, 7),
    ],
)
def test_the_longest_draft_is_that_for_which_the_engines_have_graphs(recipe, rollout, tlt, longest):
    with open_dict(recipe):
        recipe.actor_rollout_ref.rollout = {**recipe.actor_rollout_ref.rollout, **rollout}
        recipe.tlt = {"speculation": tlt}
    assert read_settings(recipe).speculation.longest == longest
    with open_dict(recipe):
        recipe.trainer.device = "cpu"
    if "arms" not in tlt:
        assert read_settings(recipe).speculation.longest == tlt.get("max_draft_length", 3)


def test_without_graphs_for_every_arm_the_longest_draft_is_shorter(recipe, monkeypatch):
    monkeypatch.setenv("TLT_FULL_GRAPHS", "0")
    assert read_settings(recipe).speculation.longest == 3
    with open_dict(recipe):
        recipe.ray_kwargs = {"ray_init": {"runtime_env": {"env_vars": {"TLT_FULL_GRAPHS": "1"}}}}
    assert read_settings(recipe).speculation.longest == 7


def test_settings_default_without_a_tlt_node(recipe):
    with open_dict(recipe):
        recipe.trainer.device = "cpu"
    speculation = replace(DEFAULTS.speculation, max_draft_length=3)
    assert read_settings(recipe) == replace(DEFAULTS, speculation=speculation)


def test_the_environment_lists_every_package_that_matters():
    assert set(read_environment().versions) == {"verl", "vllm", "speculators"}


def test_a_distribution_without_its_module_is_not_installed(tmp_path, monkeypatch):
    info = tmp_path / "tlt_ghost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tlt_ghost\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("tlt_ghost") is None
    (tmp_path / "tlt_ghost.py").touch()
    import importlib

    importlib.invalidate_caches()
    assert installed("tlt_ghost") == "1.0"
    (tmp_path / "tlt_anonymous.py").touch()
    assert installed("tlt_anonymous") == "unknown"
