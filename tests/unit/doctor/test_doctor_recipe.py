"""A recipe composed from verl's own files or read from its script, and the settings it gives."""

from dataclasses import replace

import pytest
import transformers
from omegaconf import open_dict

from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.doctor.recipe import compose, read_script, read_settings

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


def test_a_script_is_read_by_running_it_with_a_stand_in_for_python(script):
    found = read_script(script, ["/policy with space", "+tlt=default"], {"FILES": "it's here.parquet"})
    assert found.config == "config/ppo_trainer.yaml"
    assert found.overrides == (
        "data.train_files=it's here.parquet", "data.val_files=['it's here.parquet']", "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=/policy with space", "+tlt=default",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist."),
        ("echo hello", "does not start `python -m verl.trainer.main_ppo` here: exit status 0."),
        ("set -u\npython -m verl.trainer.main_ppo $NOWHERE", "NOWHERE: unbound variable"),
        (
            "python prepare.py\ntorchrun -m verl.trainer.sft_trainer x=1",
            "starts `torchrun -m verl.trainer.sft_trainer`.",
        ),
        ("sleep 5; python -m verl.trainer.main_ppo", "did not come to verl.trainer.main_ppo within 0 s."),
    ],
)
def test_a_script_that_does_not_come_to_it_is_one_sentence(tmp_path, text, said):
    script = tmp_path / "recipe.sh"
    if text is not None:
        script.write_text(text)
    with pytest.raises(TLTConfigError) as error:
        read_script(script, timeout_s=0.2 if "sleep" in str(text) else 60)
    assert str(script) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rollout", "tlt", "longest"),
    [
        ({}, {}, 7),
        ({"enforce_eager": True}, {}, 3),
        ({"engine_kwargs": {"vllm": {"enforce_eager": True}}}, {}, 3),
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


def test_settings_default_without_a_tlt_node(recipe):
    with open_dict(recipe):
        recipe.trainer.device = "cpu"
    speculation = replace(TLTConfig().speculation, max_draft_length=3)
    assert read_settings(recipe) == replace(TLTConfig(), speculation=speculation)
