"""`verl-tlt doctor` on verl's real config files."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.config import COSTS_DIR
from verl_tlt.doctor.command import costs_directory, diagnose
from verl_tlt.doctor.recipe import Recipe

FLAG = ("+tlt=default", "actor_rollout_ref.rollout.name=vllm")


def test_a_recipe_is_judged_with_the_environment(recipe):
    files = (
        f"data.train_files={recipe.data.train_files}",
        f"data.val_files={recipe.data.train_files}",
        f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}",
    )
    assert {f.level for f in diagnose(Recipe((*FLAG, *files)))} == {"ok"}
    refused = [f.what for f in diagnose(Recipe((*FLAG, *files, "+tlt.spot.typo=1"))) if f.level == "refuse"]
    assert refused == ["settings"]


def test_the_doctor_takes_a_script_and_says_first_whether_tlt_is_on(script, recipe):
    policy, wide = str(recipe.actor_rollout_ref.model.path), {"COLUMNS": "300"}
    for flag, exit_code, first in (
        (["+trainer.plugin=tlt"], 0, "TLT is on"),
        ([], 0, "TLT is off: this recipe trains with stock verl until"),
        (["+trainer.plugin=tlt2"], 1, "TLT is off: trainer.plugin=tlt2 names no trainer plugin"),
        (["+tlt.spot.enable=false"], 1, "TLT is off: the tlt node does nothing without trainer.plugin"),
        (["+tlt=default", "+tlt.spot.typo=1"], 1, "TLT is on"),
    ):
        done = CliRunner().invoke(app, ["doctor", str(script), policy, *flag], env=wide)
        lines = [line for line in done.output.splitlines() if line.startswith("│")]
        assert done.exit_code == exit_code and first in lines[0], done.output
    assert "actor_rollout_ref.model.path is a qwen3 model" in done.output or "tlt.spot.typo" in done.output
    bad = CliRunner().invoke(app, ["doctor", "nowhere.sh"])
    assert bad.exit_code == 1 and "nowhere.sh does not exist." in bad.output


def test_calibrate_asks_the_doctor_first_and_needs_no_data(recipe):
    policy = f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}"
    said = CliRunner().invoke(app, ["calibrate", "--cpu", policy, "+tlt=default"])
    assert said.exit_code == 1 and said.output.strip() == (
        "actor_rollout_ref.rollout.name is not set; verl-tlt works with vllm only."
    )


@pytest.mark.parametrize(
    ("setting", "where"), [("/x/costs", "/x/costs"), ("null", COSTS_DIR), (None, COSTS_DIR)], ids=["a place", "no", "-"]
)
def test_costs_are_kept_where_the_recipes_run_looks_for_them(setting, where):
    asked = () if setting is None else (f"tlt.speculation.costs_dir={setting}",)
    assert costs_directory(Recipe((*FLAG, *asked))) == Path(where)


def test_without_a_recipe_packages_alone_are_judged():
    good = CliRunner().invoke(app, ["doctor"])
    assert good.exit_code == 0 and all(name in good.output for name in ("verl", "vllm", "speculators"))


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
        "from verl_tlt.doctor.recipe import Recipe\n"
        "assert [f.level for f in diagnose(Recipe(('+tlt=default',)))][:2] == ['refuse', 'refuse']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
