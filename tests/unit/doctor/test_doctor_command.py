"""`verl-tlt doctor` on verl's real config files."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.config import TLTConfigError
from verl_tlt.doctor.command import compose, diagnose
from verl_tlt.doctor.recipe import read_script

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


SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=$(python3 -c 'import nothing_of_that_name' 2>/dev/null && echo npu || echo {device})
DATA=(data.train_files="$FILES" "data.val_files=['$FILES']")
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_trainer.yaml' "${{DATA[@]}}" trainer.device=$DEVICE \\
    actor_rollout_ref.rollout.name=vllm "actor_rollout_ref.model.path=$1" "${{@:2}}" 2>&1 | tee log.txt
"""


@pytest.fixture
def script(recipe, tmp_path, monkeypatch):
    """A recipe as people write them: with Python in it, arrays, and arguments of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FILES", str(recipe.data.train_files))
    path = tmp_path / "recipe.sh"
    path.write_text(SCRIPT.format(device="cpu"))
    return path


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
            "python prepare.py\npython -m verl.trainer.sft_trainer x=1",
            "it starts `python -m verl.trainer.sft_trainer`.",
        ),
        ("torchrun --standalone -m verl.trainer.fsdp_sft_trainer", "it starts `torchrun --standalone -m`."),
        ("sleep 5; python -m verl.trainer.main_ppo", "did not come to verl.trainer.main_ppo within 1 s."),
    ],
)
def test_a_script_that_does_not_come_to_it_is_one_sentence(tmp_path, text, said):
    script = tmp_path / "recipe.sh"
    if text is not None:
        script.write_text(text)
    with pytest.raises(TLTConfigError) as error:
        read_script(script, timeout_s=1 if "sleep" in str(text) else 60)
    assert str(script) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_the_doctor_takes_a_script_and_says_first_whether_tlt_is_on(script, recipe):
    policy, wide = str(recipe.actor_rollout_ref.model.path), {"COLUMNS": "300"}
    for flag, exit_code, first in (
        (["+trainer.plugin=tlt"], 0, "TLT is on"),
        ([], 0, "TLT is off: this recipe trains with stock verl until"),
        (["+trainer.plugn=tlt"], 1, "TLT is off: trainer.plugn=tlt has no effect"),
        (["+tlt.spot.enable=false"], 1, "TLT is off: tlt.spot.enable is set but TLT is off"),
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
    said = CliRunner().invoke(
        app,
        ["calibrate", "--cpu", policy, "actor_rollout_ref.rollout.name=sglang", "+tlt=default", "tlt.spot.poll_s=0"],
    )
    assert said.exit_code == 1 and "tlt.spot.poll_s must be" in said.output
    said = CliRunner().invoke(app, ["calibrate", "--cpu", policy, "+tlt=default"])
    assert said.exit_code == 1 and said.output.strip() == (
        "actor_rollout_ref.rollout.name is not set; verl-tlt works with vllm only."
    )


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
