"""`verl-tlt doctor` on verl's real config files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import Recipe, compose
from verl_tlt.commands.cli import app
from verl_tlt.commands.doctor.command import conclude, costs_directory, diagnose, examine_gpus, visible_gpus
from verl_tlt.commands.doctor.standalone_engine import set_up
from verl_tlt.commands.script.reader import read_script
from verl_tlt.config import COSTS_DIR
from verl_tlt.upstream.sources import source_root
from verl_tlt.upstream.versions import look_first_in

FLAG = ("+tlt=default", "actor_rollout_ref.rollout.name=vllm")


def places(recipe):
    """Overrides that name its data and its policy."""
    data = [f"data.{part}_files={recipe.data.train_files}" for part in ("train", "val")]
    return *data, f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}"


def test_a_recipe_is_judged_with_the_environment(recipe):
    files = (*places(recipe), "trainer.device=cpu")
    assert {f.level for f in diagnose(Recipe((*FLAG, *files)))} == {"ok"}
    refused = [f.what for f in diagnose(Recipe((*FLAG, *files, "+tlt.spot.typo=1"))) if f.level == "refuse"]
    assert refused == ["settings"]


def test_the_doctor_takes_a_script_and_says_first_whether_tlt_is_on(script, recipe):
    policy, wide = str(recipe.actor_rollout_ref.model.path), {"COLUMNS": "300"}
    for flag, exit_code, first in (
        (["+trainer.plugin=tlt"], 0, "TLT is on"),
        ([], 3, "TLT is off: this recipe trains with stock verl until"),
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
    bad = CliRunner().invoke(app, ["doctor", str(script.parent)], env=wide)
    assert bad.exit_code == 1 and f"{script.parent} is no script." in bad.output


def test_paths_begin_where_the_script_stands_when_it_starts(script, recipe, tmp_path, monkeypatch):
    """Of data, policy and costs, wherever the doctor itself is called."""
    (there := tmp_path / "there").mkdir()
    shutil.copy(recipe.data.train_files, there / "data.parquet")
    (there / "policy").symlink_to(recipe.actor_rollout_ref.model.path)
    monkeypatch.setenv("FILES", "data.parquet")
    script.write_text(script.read_text().replace("DEVICE=", f"cd {there}\nDEVICE=", 1))
    done = CliRunner().invoke(app, ["doctor", str(script), "policy", "+tlt=default"])
    assert done.exit_code == 0, done.output
    found = read_script(script, ["policy", "+tlt=default", "tlt.speculation.costs_dir=costs"])
    assert costs_directory(found) == there / "costs" and set_up(found).model.path == str(there / "policy")
    own = {"actor_rollout_ref.rollout.engine_kwargs.vllm.dtype": "float32"}
    assert set_up(found, own).rollout.dtype == "float32", "the drafter's, too"


def test_calibrate_asks_the_doctor_first_and_needs_no_data(recipe):
    said = CliRunner().invoke(app, ["calibrate", "--cpu", places(recipe)[-1], "+tlt=default"])
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
        "import sys; from verl_tlt.commands import cli\n"
        "assert not {'torch', 'verl', 'vllm', 'ray', 'omegaconf', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_where_nothing_is_installed_the_doctor_says_so():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['omegaconf', 'hydra', 'verl', 'vllm', 'torch']))\n"
        "from verl_tlt.commands.doctor.command import diagnose\n"
        "from verl_tlt.checks.recipe import Recipe\n"
        "assert [f.level for f in diagnose(Recipe(('+tlt=default',)))][:2] == ['refuse', 'refuse']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


EIGHT = (*FLAG, "trainer.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("levels", "overrides", "status", "answer"),
    [
        (["ok", "warn"], FLAG, 0, "TLT can run here."),
        (["ok", "if"], FLAG, 3, "TLT can run, if this is put right or holds where it runs: Sentence 1."),
        (["refuse", "if", "refuse"], FLAG, 1, "TLT cannot run here: Sentence 0. (1 more above)"),
        (["ok"], (), 0, "TLT can run with what is installed here; give your recipe to know whether that can, too."),
    ],
)
def test_the_last_line_answers_and_the_exit_status_means_it(levels, overrides, status, answer):
    findings = [Finding(level, "x", f"Sentence {i}.") for i, level in enumerate(levels)]
    assert conclude(findings, Recipe(overrides)) == (answer, status)


def test_without_the_gpus_that_a_recipe_asks_for_it_is_not_ok(recipe, monkeypatch):
    """On a node without a GPU, where others may have them; `--cpu` says what to do."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [*EIGHT, *places(recipe)]
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "300"})
    assert done.exit_code == 3, done.output
    assert done.output.splitlines()[-1].endswith("trainer.n_gpus_per_node=8 ask for 8 GPUs, and none are seen here.")
    rollout = [f"actor_rollout_ref.rollout.{count}" for count in ("nnodes=2", "n_gpus_per_node=4")]
    (own,) = examine_gpus(compose([*EIGHT, *rollout, "trainer.v1.trainer_mode=separate_async"], "ppo_trainer"), {})
    assert own.level == "if" and "n_gpus_per_node=4 ask for 16 GPUs" in own.sentence, "of which rollouts have their own"
    for command in (["doctor", "--gpu"], ["calibrate"]):
        said = CliRunner().invoke(app, [*command, *words], env={"COLUMNS": "300"})
        assert said.exit_code == 1 and "No GPU found; --cpu measures on the CPU." in said.output


FOUR = [f"dev/nvidia{i}" for i in range(4)]
AMD = [f"sys/class/kfd/kfd/topology/nodes/{i}/gpu_id" for i in range(4)]  # a CPU and three GPUs


@pytest.mark.parametrize(
    ("files", "environment", "found"),
    [
        ([], {}, 0),
        (["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"], {}, 2),
        (["dev/nvidia0", "dev/nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1),
        (["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 2),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "7"}, 0),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "1, 3,4,0"}, 2),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "2,-2,3"}, 1),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "1,0,1"}, 0),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-8932f937"}, 0),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-d1c6ab0f"}, 2),
        (FOUR, {"HIP_VISIBLE_DEVICES": "0"}, 4),
        (["dev/dxg"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (AMD, {"HIP_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}, 2),
        (AMD, {"HIP_VISIBLE_DEVICES": "3"}, 0),
        (["sys/class/kfd/kfd/topology/nodes/0/gpu_id", "sys/class/kfd/kfd/topology/nodes/1/gpu_id"], {}, 1),
    ],
)
def test_gpus_are_counted_by_their_devices(tmp_path, files, environment, found):
    for i, name in enumerate(files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(1000 * i))
    assert visible_gpus(environment, str(tmp_path)) == found


def test_a_clone_where_the_run_starts_hides_the_installed_verl(script, recipe, tmp_path, monkeypatch):
    """As `python -m` finds it: its release is judged, and its configuration composed."""
    policy, wide = str(recipe.actor_rollout_ref.model.path), {"COLUMNS": "400"}
    monkeypatch.delitem(sys.modules, "verl", raising=False)  # a command has not imported it
    there = CliRunner().invoke(app, ["doctor", str(script), policy, "+trainer.plugin=tlt"], env=wide)
    assert there.exit_code == 0 and f"verl is read in {source_root('verl') / 'verl'}" in there.output
    shutil.copytree(source_root("verl") / "verl" / "trainer" / "config", tmp_path / "verl" / "trainer" / "config")
    (tmp_path / "verl" / "__init__.py").touch()
    (tmp_path / "verl" / "version").mkdir()
    (tmp_path / "verl" / "version" / "version").write_text("0.8.0\n")
    try:
        done = CliRunner().invoke(app, ["doctor", str(script), policy, "+trainer.plugin=tlt"], env=wide)
    finally:
        look_first_in([])
    assert done.exit_code == 1 and "verl 0.8.0 is installed, and verl-tlt needs" in done.output
    assert f"verl is read in {tmp_path / 'verl'}, which hides that in" in done.output
    assert done.output.splitlines()[-1].startswith("TLT cannot run here: verl 0.8.0")
