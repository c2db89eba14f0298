"""A recipe composed from verl's own files or read from its script, and the settings it gives."""

import re
from dataclasses import replace

import pytest
import transformers
from omegaconf import OmegaConf, open_dict

from verl_tlt.checks import rules
from verl_tlt.checks.recipe import COUNTS, NEEDED, compose, read_settings
from verl_tlt.commands.script.reader import read_script
from verl_tlt.config import MOST, TLTConfig, TLTConfigError

FLAG = ("+tlt=default", "actor_rollout_ref.rollout.name=vllm")


def test_a_recipe_is_composed_from_verls_own_files():
    config = compose([*FLAG, "tlt.spot.enable=false"], "ppo_trainer")
    assert config.trainer.plugin == "tlt" and config.tlt.spot.enable is False
    assert config.trainer.v1.trainer_mode == "sync"
    with pytest.raises(TLTConfigError, match=r"no\.such\.key") as error:
        compose(["no.such.key=1"], "ppo_trainer")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", ["+tlt=defualt", "tlt=default", "trainer.plugin=tlt", "tlt.spot.enable=false"])
def test_a_misspelt_flag_is_answered_with_the_right_one(wrong):
    with pytest.raises(TLTConfigError) as error:
        compose([wrong, "actor_rollout_ref.rollout.name=vllm"], "ppo_trainer")
    said = str(error.value)
    assert said.startswith(wrong) and ("+tlt=default" in said or "+trainer.plugin=tlt" in said) and "Hydra" not in said


def test_a_script_is_read(script):
    found = read_script(script, ["/policy with space", "+tlt=default"], {"FILES": "it's here.parquet"})
    assert found.config == "config/ppo_trainer.yaml"
    assert found.overrides == (
        "data.train_files=it's here.parquet", "data.val_files=['it's here.parquet']", "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=/policy with space", "+tlt=default",
    )  # fmt: skip


@pytest.mark.parametrize("empty", ["trainer.n_gpus_per_node=", "+trainer.x=", "data.train_files="])
def test_an_override_without_a_value_is_an_error(empty):
    with pytest.raises(TLTConfigError, match=re.escape(f"{empty} has no value")):
        compose([*FLAG, empty], "ppo_trainer")
    assert compose([*FLAG, "trainer.project_name=''"], "ppo_trainer").trainer.project_name == ""


@pytest.fixture(scope="module")
def verls():
    return compose(FLAG, "ppo_trainer")


@pytest.mark.parametrize("value", [10**30, MOST + 1, -1, 0, 1.5, 8.0, float("inf"), "two", True, [8], {"a": 1}, None])
@pytest.mark.parametrize("key", COUNTS)
def test_a_count_that_is_none_is_named_by_its_key(verls, key, value):
    kept, least = OmegaConf.select(verls, key), int(key in NEEDED)
    with open_dict(verls):
        OmegaConf.update(verls, key, value, force_add=True)
    try:
        if not least and value in (0, None) and value is not False:
            read_settings(verls)
            return
        with pytest.raises(TLTConfigError) as error:
            read_settings(verls)
    finally:
        OmegaConf.update(verls, key, kept, merge=False)
    said = "null" if value is None else repr(value)
    named = f"{key} must be a whole number from {least} to 2,147,483,647, not "
    assert str(error.value) == f"{named}{said}."


def test_another_folder_of_configs_is_searched(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 7}\n")
    (script := tmp_path / "recipe.sh").write_text(
        f'cd {tmp_path}\npython -m verl.trainer.main_ppo --config-dir more --config-name=mine "$@"\n'
    )
    recipe = read_script(script, FLAG)
    config = compose(recipe.overrides, recipe.config)
    assert config.trainer.nnodes == 7 and config.trainer.plugin == "tlt"


@pytest.mark.parametrize("flag", [
    ["+tlt=default", "+trainer.plugin=tlt"], ["+trainer.plugin=tlt", "+tlt=default"], ["+tlt=default", "+tlt=default"],
    ["+trainer.plugin=tlt", "+trainer.plugin=tlt"], ["+tlt=default", "++trainer.plugin=tlt", "trainer.plugin=tlt"],
])  # fmt: skip
def test_both_forms_of_the_flag_are_as_good_as_one(flag):
    config = compose(["actor_rollout_ref.rollout.name=vllm", *flag], "ppo_trainer")
    assert config.trainer.plugin == "tlt" and ("+tlt=default" in flag) == ("tlt" in config)


def test_a_recipe_with_the_flag_runs_as_stock_verl_where_that_is_said():
    assert compose([*FLAG, "+trainer.plugin=null"], "ppo_trainer").trainer.plugin is None


@pytest.mark.parametrize(
    ("rollout", "tlt", "longest"),
    [
        ({}, {}, 7),
        ({"enforce_eager": True}, {}, 3),
        ({"engine_kwargs": {"vllm": {"enforce_eager": True}}}, {}, 3),
        ({"enforce_eager": True, "engine_kwargs": {"vllm": {"enforce_eager": None}}}, {}, 3),  # verl leaves nulls out
        ({"engine_kwargs": {"vllm": {"decode_context_parallel_size": 2}}}, {}, 3),
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


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3Next"])
def test_a_policy_with_other_layers_than_attention_has_a_shorter_longest_draft(recipe, tmp_path, name):
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    recipe.actor_rollout_ref.model.path = str(tmp_path)
    assert read_settings(recipe).speculation.longest == 3


@pytest.mark.parametrize(
    ("release", "engine", "speculation", "longest", "said"),
    [
        ("0.31.0", {"max_num_seqs": 1024}, {}, 7, []),  # the V1 runner keeps none
        ("0.32.0", {"max_num_seqs": 256}, {}, 7, ["ok 0.5 GB"]),
        ("0.32.0", {"max_num_seqs": 256, "dtype": "float"}, {}, 3, ["ok 0.5 GB"]),
        ("0.32.0", {"max_num_seqs": 1024}, {}, 3, ["ok 0.9 GB"]),
        ("0.32.0", {"max_num_seqs": 1024}, {"max_draft_length": 7}, 7, ["warn 2.2 GB"]),
        ("0.32.0", {"max_num_seqs": 1024}, {"arms": [0, 7]}, 7, ["warn 2.2 GB"]),
        ("0.32.0", {"max_num_seqs": 1024}, {"source": "ngram"}, 7, []),
    ],
)
def test_draft_logits_that_an_engine_keeps_in_sleep_are_told_and_bound_the_longest_draft(
    recipe, tmp_path, monkeypatch, release, engine, speculation, longest, said
):
    transformers.Qwen3Config(vocab_size=151_936).save_pretrained(tmp_path)
    monkeypatch.setattr("verl_tlt.checks.recipe.installed", lambda _: release)
    with open_dict(recipe):
        recipe.actor_rollout_ref.model.path = str(tmp_path)
        recipe.actor_rollout_ref.rollout.engine_kwargs = {"vllm": engine}
        recipe.tlt = {"speculation": speculation}
    settings = read_settings(recipe)
    assert settings.speculation.longest == longest
    found = list(rules.logits(recipe, settings))
    assert [f"{f.level} {f.sentence.split(' keep ')[1].split(' of ')[0]}" for f in found] == said
    assert all(f"tlt.speculation.max_draft_length={longest}" in f.sentence for f in found)


def test_settings_default_without_a_tlt_node(recipe):
    with open_dict(recipe):
        recipe.trainer.device = "cpu"
    speculation = replace(TLTConfig().speculation, max_draft_length=3)
    assert read_settings(recipe) == replace(TLTConfig(), speculation=speculation)
