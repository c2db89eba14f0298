"""`verl-tlt doctor` on verl's real config files."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.config import TLTConfigError
from verl_tlt.doctor.command import compose, diagnose

FLAG = ("+tlt=default", "actor_rollout_ref.rollout.name=vllm")


def test_a_recipe_is_composed_from_verls_own_files():
    config = compose([*FLAG, "tlt.spot.enable=false"], "ppo_trainer")
    assert config.trainer.plugin == "tlt" and config.tlt.spot.enable is False
    assert config.trainer.v1.trainer_mode == "sync"


def test_a_recipe_that_does_not_compose_is_one_sentence():
    with pytest.raises(TLTConfigError) as error:
        compose(["no.such.key=1"], "ppo_trainer")
    assert "no.such.key" in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_is_judged_with_the_environment(recipe):
    files = (
        f"data.train_files={recipe.data.train_files}",
        f"data.val_files={recipe.data.train_files}",
        f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}",
    )
    assert {f.level for f in diagnose([*FLAG, *files], "ppo_trainer")} == {"ok"}
    refused = [f.what for f in diagnose([*FLAG, *files, "+tlt.spot.typo=1"], "ppo_trainer") if f.level == "refuse"]
    assert refused == ["settings"]


def test_the_command_prints_a_table_and_its_exit_code_says_whether_it_can_run():
    good = CliRunner().invoke(app, ["doctor"])
    assert good.exit_code == 0 and "speculators" in good.output
    wide = {"COLUMNS": "200"}
    bad = CliRunner().invoke(app, ["doctor", *FLAG, "trainer.v1.trainer_mode=one_step_off"], env=wide)
    assert bad.exit_code == 1 and "separate_async" in bad.output


def test_asking_for_help_imports_no_framework():
    code = (
        "import sys; from verl_tlt import cli\n"
        "assert not {'torch', 'verl', 'vllm', 'ray', 'omegaconf', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_where_nothing_is_installed_the_doctor_says_so():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['omegaconf', 'hydra', 'verl', 'vllm', 'torch']))\n"
        "from verl_tlt.doctor.command import diagnose\n"
        "assert [f.level for f in diagnose(['+tlt=default'], 'ppo_trainer')][:2] == ['refuse', 'refuse']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
