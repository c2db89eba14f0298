"""`verl-tlt doctor`, and the recipe it composes from verl's own files."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cli import cli
from omegaconf import OmegaConf, open_dict

import verl_tlt
from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import Recipe, compose, read_settings, replicas_on
from verl_tlt.checks.rules import switched_on
from verl_tlt.commands.capture import capture, recipe_of
from verl_tlt.commands.compare.plan import make_plan
from verl_tlt.commands.doctor import command, engine_check
from verl_tlt.commands.doctor.command import conclude, diagnose, examine_gpus, next_step, unread_keys
from verl_tlt.commands.doctor.engine_check import Answer
from verl_tlt.commands.doctor.standalone_engine import set_up
from verl_tlt.commands.warmup.run import decided_options
from verl_tlt.config import MOST, TLTConfigError
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.upstream.versions import location, look_first_in

pytestmark = pytest.mark.usefixtures("variables")
FLAG = ("+trainer.plugin=tlt", "actor_rollout_ref.rollout.name=vllm")


# ---------------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["+trainer.plugin=tlt"], 0, "OK: TLT can run here.\nNext: verl-tlt doctor --gpu, with the same recipe."),
        ([], 3, "OK, but TLT is off: this recipe trains with stock verl until"),
        (["+trainer.plugin=tlt2"], 1, "No: TLT is off: trainer.plugin=tlt2 names no trainer plugin"),
        (["+trainer.plugin='${oc.env:NOWHERE}'"], 1, "No: trainer.plugin cannot be read from the configuration: "),
        (["trainer.v1.trainer_mode='${oc.env:NOWHERE}'"], 1, "No: trainer.v1.trainer_mode cannot be read from"),
        (["+trainer.plugin=tlt", "tlt.spot.typo=1"], 1, "tlt.spot.typo"),
        (["+trainer.plugin=tlt", "+tensor_parallel_size=2"], 0, "verl does not read tensor_parallel_size. Did you"),
        (["+trainer.plugin=tlt", "+actor_rollout_ref.rollout.tensor_parallel_size=2"], 1, "tensor_parallel_size"),
    ],
)
def test_the_doctor_answers_in_its_last_lines(overrides, words, status, said):
    code, output = cli("doctor", *overrides, *words)
    assert code == status and said in output.partition("--all lists them")[2], output
    assert "is a qwen3 model" not in output and "checks OK" in output, "what is fine is one line"


def test_what_the_engine_measured_is_shown_beside_one_line_of_what_is_fine(overrides, tmp_path, monkeypatch):
    measured = [
        Finding("ok", "drafter after sleep", "it was loaded again after sleep in 0.50 s"),
        Finding("warn", "drafter off against stock", "1.20 times stock's step (batch 1: 12.00 against 10.00 ms)."),
        Finding("ok", "K=3 against off", "by batch 1: 1.50x, 4: 2.00x; pays above this accept length"),
    ]
    monkeypatch.setattr(engine_check, "run_job", lambda _: Answer(measured, LatencyTable(), "H100"))
    words = [*overrides, "+trainer.plugin=tlt"]
    _, before = cli("doctor", *words)
    code, output = cli("doctor", "--gpu", "--out", tmp_path / "r.json", *words)
    assert code == 0 and "is a qwen3 model" not in output, output
    (count,) = (line for line in before.splitlines() if "checks OK" in line)
    assert count in output.splitlines(), "what is shown is not counted"
    for finding in measured:
        label = {"ok": "ok     ", "warn": "warning"}[finding.level]
        assert output.count(f"{label} {finding.what}: {finding.sentence}\n") == 1, output


def test_a_command_is_judged_where_it_starts_verl(overrides, recipe, policy, tmp_path):
    """Paths of data, policy and costs begin there, wherever the doctor itself is called."""
    (there := tmp_path / "there").mkdir()
    shutil.copy(recipe.data.train_files, there / "data.parquet")
    (there / "policy").symlink_to(policy)
    local = ["data.train_files=data.parquet", "data.val_files=data.parquet", "actor_rollout_ref.model.path=policy"]
    start = shlex.join([sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *local])
    (script := tmp_path / "recipe.sh").write_text(f'cd {there}\n{start} "$@"\n')
    code, output = cli("doctor", "--", "bash", script, "+trainer.plugin=tlt")
    assert code == 0 and "OK: TLT can run here." in output, output
    found = Recipe((*FLAG, "actor_rollout_ref.model.path=policy"), directory=str(there))
    assert set_up(found).model.path == str(there / "policy")
    own = {"actor_rollout_ref.rollout.engine_kwargs.vllm.dtype": "float32"}
    assert set_up(found, own).rollout.dtype == "float32", "the drafter's, too"


def test_an_engine_for_a_policy_on_another_file_system_is_not_measured(overrides):
    words = (*overrides, "+trainer.plugin=tlt", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True")
    code, output = cli("doctor", "--gpu", *words, "actor_rollout_ref.model.path=hdfs://nn/q")
    assert code == 1 and "No: actor_rollout_ref.model.path=hdfs://nn/q is on another file system: copy it" in output


def test_a_composed_config_is_a_recipe_too(overrides, tmp_path):
    file = tmp_path / "composed.yaml"
    OmegaConf.save(compose(overrides, "ppo_trainer"), file)
    code, output = cli("doctor", "--config", file, "+trainer.plugin=tlt")
    assert code == 0 and "OK: TLT can run here." in output, output


def test_a_recipe_is_read_with_the_variables_of_its_command(recipe, policy, tmp_path):
    """Those that the command's script has set, and this process has not; one says where more configs are."""
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://${oc.env:MY_RUN}/more', 'pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, extra, _self_]\n"
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "extra.yaml").write_text("# @package _global_\ntrainer: {project_name: theirs}\n")
    words = ("data.train_files='${oc.env:MY_DATA}'", "data.val_files='${oc.env:MY_DATA}'", "trainer.device=cpu",
             "trainer.default_local_dir='${oc.env:MY_RUN}'", "actor_rollout_ref.actor.use_dynamic_bsz=true",
             f"actor_rollout_ref.model.path={policy}", f"--config-path={tmp_path}", "--config-name=mine")  # fmt: skip
    variables = f"export MY_DATA={recipe.data.train_files} MY_RUN={tmp_path}"
    start = shlex.join([sys.executable, "-m", "verl.trainer.main_ppo", *FLAG, *words])
    found = capture(["bash", "-c", f"{variables}; {start}"])
    assert not [finding for finding in diagnose(found) if finding.level in ("refuse", "if")]
    assert found.compose().trainer.project_name == "theirs"
    assert decided_options(found)["prompts"] == [Path(recipe.data.train_files)]
    assert make_plan(found, 4, tmp_path).start is None


def test_a_config_of_verls_own_may_be_named_with_its_suffix(overrides):
    code, output = cli("doctor", "--config-name", "ppo_trainer.yaml", *overrides, "+trainer.plugin=tlt")
    assert code == 0 and "OK: TLT can run here." in output, output


def test_after_the_packages_comes_the_recipe_then_its_engine_then_a_comparison():
    steps = [next_step(gpu=False, has_recipe=False), *(next_step(gpu=gpu, has_recipe=True) for gpu in (False, True))]
    assert [step.split(",")[0] for step in steps] == [
        "verl-tlt doctor -- bash your_recipe.sh", "verl-tlt doctor --gpu", "verl-tlt compare",
    ]  # fmt: skip


def test_a_config_that_is_no_yaml_is_named_with_its_line(tmp_path):
    for content, place in ((b"WARNING: a: b\ntrainer: {}\n", ", line 1"), (b"\xff\xfe", "")):
        (file := tmp_path / "composed.yaml").write_bytes(content)
        code, output = cli("doctor", "--config", file)
        assert code == 1 and "No: Hydra cannot compose" in output and place in output, output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-name", "x"], "--config-name x needs overrides: give at least one of your recipe."),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml is not a file."),
        (["--config", __file__], "test_doctor_command.py: Hydra reads files that end in .yaml; rename it."),
        (["--gpu", "--out", os.path.dirname(__file__), "a=1"], "unit/doctor is a folder: name a file."),
        (["--gpu", "--out", f"{__file__}/x.json", "a=1"], "the folder of --out="),
        (["--config", "c.yaml", "--", "bash", "r.sh"], "--config and a command after -- name two runs"),
        (["recipe.sh", "a=1"], "after two dashes: verl-tlt doctor -- recipe.sh a=1"),
        (["poetry", "run", "python", "x.py"], "after two dashes: verl-tlt doctor -- poetry run python x.py"),
        (["--all", "A=1", "timeout", "9", "bash", "r.sh"], "dashes: A=1 verl-tlt doctor --all -- timeout 9 bash r.sh"),
        (["kubectl", "exec", "x", "--", "python"], "dashes: verl-tlt doctor -- kubectl exec x -- python"),
        (["--all", "--"], "No command stands after the dashes: verl-tlt doctor ... -- bash recipe.sh"),
        (["--gpu"], "--gpu measures the engine of your recipe: give its command after --, or its overrides."),
    ],
)
def test_a_wrong_way_to_name_the_run_is_one_sentence(words, said):
    code, output = cli("doctor", *words)
    assert code == 1 and said in output


def test_the_value_of_an_option_is_no_command():
    code, output = cli("doctor", "--out", "results/ray", "--seconds", "x")
    assert code == 2 and "Invalid value for '--seconds'" in output


def test_under_another_interpreter_the_command_goes_on_with_that(overrides, tmp_path):
    """Its releases are judged; here it has this one's packages, and another place."""
    site = sysconfig.get_path("purelib")
    own = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    (next(own.glob("lib/python3*/site-packages")) / "all.pth").write_text(f"import site; site.addsitedir({site!r})\n")
    command = [own / "bin" / "python", "-m", "verl.trainer.main_ppo", *overrides, "+trainer.plugin=tlt"]
    words = [sys.executable, "-m", "verl_tlt.commands.cli", "doctor", "--", *command]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "OK: TLT can run here." in done.stdout, done.stderr
    assert f"Going on with {own}/bin/python, which the command starts verl with." in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "from verl_tlt.commands import cli\n"
        "assert not {'torch', 'verl', 'vllm', 'ray', 'omegaconf', 'transformers'} & set(sys.modules)",
        "sys.modules.update(dict.fromkeys(['omegaconf', 'hydra', 'verl', 'vllm', 'torch']))\n"
        "from verl_tlt.commands.doctor.command import diagnose\n"
        "from verl_tlt.checks.recipe import Recipe\n"
        "assert [f.level for f in diagnose(Recipe(('+trainer.plugin=tlt',)))][:2] == ['refuse', 'refuse']",
    ],
    ids=["help", "the doctor where nothing is installed"],
)
def test_no_framework_is_imported(code):
    subprocess.run([sys.executable, "-c", f"import sys\n{code}"], check=True, timeout=300)


def test_the_answer_is_of_the_worst_finding():
    findings = [Finding(level, "x", f"Sentence {i}.") for i, level in enumerate(("refuse", "if", "refuse"))]
    assert conclude(findings, has_recipe=True) == ("No: Sentence 0. (1 more above)", 1)
    assert conclude([], has_recipe=False)[0].startswith("OK: TLT can run with the packages installed here.")


def test_without_the_gpus_that_a_recipe_asks_for_it_is_ok_elsewhere(overrides, monkeypatch):
    """On a node without a GPU, where others may have them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    eight = ["+trainer.plugin=tlt", "trainer.device=cuda", "trainer.n_gpus_per_node=8"]
    code, output = cli("doctor", *overrides, *eight)
    assert code == 3, output
    needed = "8 GPUs needed (trainer.nnodes=1 and trainer.n_gpus_per_node=8), 0 found."
    assert f"\nOK, except on this machine: {needed}\n" in output
    rollout = [f"actor_rollout_ref.rollout.{count}" for count in ("nnodes=2", "n_gpus_per_node=4")]
    words = [*FLAG, *eight[1:], *rollout, "trainer.v1.trainer_mode=separate_async"]
    (own,) = examine_gpus(compose(words, "ppo_trainer"))
    assert own.level == "if" and own.sentence.startswith("16 GPUs needed"), "of which rollouts have their own"
    reward = [f"reward.reward_model.{word}" for word in ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")]
    (pooled,) = examine_gpus(compose([*FLAG, *eight[1:], *reward], "ppo_trainer"))
    assert pooled.sentence.startswith("10 GPUs needed"), "of which the reward model has its own"
    code, output = cli("doctor", "--gpu", *overrides, *eight)
    assert code == 1 and "There is no GPU on this machine, and the recipe has trainer.device=cuda." in output
    code, output = cli("doctor", "--gpu", "--all", *overrides, *eight, "tlt.speculation.enable=false")
    assert code == 3 and "its engines are stock vLLM's, so nothing was measured" in output


def test_a_clone_where_the_run_starts_hides_the_installed_verl(overrides, tmp_path, monkeypatch):
    """As `python -m` finds it: its release is judged, and its configuration composed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "verl", raising=False)  # a command has not imported it
    clone = tmp_path / "verl"
    shutil.copytree(location("verl") / "trainer" / "config", clone / "trainer" / "config")
    (clone / "__init__.py").touch()
    (clone / "version").mkdir()
    (clone / "version" / "version").write_text("0.8.0\n")
    try:
        code, output = cli("doctor", *overrides, "+trainer.plugin=tlt")
    finally:
        look_first_in([])
    assert code == 1 and "verl 0.8.0 is installed, and verl-tlt was tested with verl 0.9.1" in output
    assert f"verl is read in {clone}, which hides that in" in output
    assert "\nNo: verl 0.8.0" in output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'tensordict'", name="tensordict"), "tensordict is not installed here"),
        (ImportError("no libcuda\n"), "verl, or a package that it needs, cannot be imported: no libcuda."),
    ],
)
def test_a_package_that_cannot_be_imported_is_a_finding_beside_the_others(monkeypatch, error, said):
    def without(config):
        raise error

    monkeypatch.setattr(command, "examine_gpus", without)
    findings = command.diagnose(Recipe(("+trainer.plugin=tlt",)))
    (refused,) = [f for f in findings if f.what == "packages"]
    assert refused.level == "refuse" and refused.sentence.startswith(said)
    assert len(findings) > 3


def test_a_clone_that_is_not_installed_and_modules_beside_the_recipe_are_found(overrides, tmp_path):
    """Where every package is installed but verl, which the script starts from its clone's root."""
    for name in ("site", "clone", "own"):
        (tmp_path / name).mkdir()
    for path in (verl := location("verl")).parent.iterdir():
        if path.suffix != ".pth" and path.name.partition("-")[0] != "verl":
            (tmp_path / "site" / path.name).symlink_to(path)
    (tmp_path / "clone" / "verl").symlink_to(verl)
    (tmp_path / "own" / "my_agents.py").touch()
    script = tmp_path / "recipe.sh"
    script.write_text(
        f"""cd {tmp_path}/clone
        export VERL_USE_EXTERNAL_MODULES=my_agents PYTHONPATH=$PYTHONPATH:../own
        {sys.executable} -S -m verl.trainer.main_ppo {shlex.join(overrides)} "$@"
        """
    )
    packages = os.pathsep.join(map(str, (tmp_path / "site", Path(verl_tlt.__file__).parents[1])))

    def ended(*words):
        command = [sys.executable, "-S", "-P", "-m", "verl_tlt.commands.cli", *words, "--", "bash", str(script)]
        own = {**os.environ, "PYTHONPATH": packages, "COLUMNS": "400"}
        done = subprocess.run(command, env=own, cwd=tmp_path / "own", capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    code, output = ended("doctor", "--all")
    assert code == 3 and "OK, but TLT is off" in output, output
    assert f"verl is read in {tmp_path}/clone/verl" in output and "verl takes the rollout's and the actor's" in output
    code, output = ended("compare", "--arms", "none")
    assert code == 1 and "There is no arm 'none'" in output, output


# ---------------------------------------------------------------------- the recipe


def test_a_recipe_is_composed_from_verls_own_files():
    config = compose([*FLAG, "tlt.spot.enable=false", "trainer.project_name=''"], "ppo_trainer")
    assert config.trainer.plugin == "tlt" and config.tlt.spot.enable is False and config.trainer.project_name == ""
    assert config.trainer.v1.trainer_mode == "sync"
    assert compose([*FLAG, "+trainer.plugin=null"], "ppo_trainer").trainer.plugin is None, "it runs as stock verl"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("+trainer.x=", "+trainer.x= has no value"),
        ("trainer.n_gpus=1", "it has no trainer.n_gpus. Did you mean trainer.n_gpus_per_node?"),
        ("trainer.plugn=tlt", "Did you mean +trainer.plugin=tlt?"),
        (" ", "An override is empty: look for a space behind a backslash"),
        ("val.parquet", "val.parquet is no override, KEY=VALUE. An option with several files is given once for each"),
        ("tlt.drafter.path=~/x", "Hydra cannot read tlt.drafter.path=~/x: put its value into quotes inside quotes"),
        ("a={'b'", "Hydra cannot read a={'b': "),
        ("data.train_files=+trainer.plugin=tlt", "the script takes its first argument for data.train_files itself"),
        ("temperature=1", "it has no temperature. Did you mean actor_rollout_ref.rollout.temperature?"),
    ],
)
def test_an_override_that_cannot_be_is_one_sentence(wrong, said):
    with pytest.raises(TLTConfigError, match=re.escape(said)) as error:
        compose([FLAG[1], wrong], "ppo_trainer")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: [ppo_trainer, _self_]\n", "finds verl's by `hydra: {searchpath: [pkg://verl.trainer.config]}`"),
        ("trainer: {nnodes: 7}\n", "has no actor_rollout_ref, so it is no config of verl.trainer.main_ppo"),
    ],
)
def test_a_config_of_ones_own_without_verls_is_one_sentence(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TLTConfigError, match=re.escape(said)):
        compose((), "mine", str(tmp_path))


def test_in_a_config_with_the_flag_a_setting_needs_no_plus(tmp_path):
    own = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    own |= {"trainer": {"plugin": "tlt"}, "tlt": {"drafter": {"path": "x"}}}
    (tmp_path / "mine.yaml").write_text(json.dumps(own))
    tlt = compose(["tlt.speculation.max_draft_length=7", "+tlt.drafter.path=y"], "mine", str(tmp_path)).tlt
    assert (tlt.speculation.max_draft_length, tlt.drafter.path) == (7, "y")


def test_settings_that_nobody_reads_are_told(recipe):
    with open_dict(recipe):
        recipe.drafter = {"path": "dr"}
    (found,) = unread_keys(Recipe(("+drafter.path=dr", "+trainer.plugin=tlt", "+tlt.spot.enable=false")), recipe)
    assert found.level == "warn" and found.sentence.startswith("verl does not read drafter.path.")
    assert not [*unread_keys(Recipe(("+trainer.foo=1", "trainer.foo=2")), recipe)], "it builds on what was added"
    with open_dict(recipe):
        recipe.trainer.tlt = {"drafter": {"path": "dr"}}
    with pytest.raises(TLTConfigError, match=r"trainer\.tlt is not read: move the tlt node to the top"):
        read_settings(recipe)


def test_another_folder_of_configs_is_searched(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 7}\n")
    words = ["--config-dir", "more", "--config-name=mine", *FLAG]
    recipe = recipe_of({"arguments": words, "directory": str(tmp_path)})
    config = recipe.compose()
    assert config.trainer.nnodes == 7 and config.trainer.plugin == "tlt"


def test_a_config_in_a_folder_of_the_config_path_finds_what_is_beside_that_folder(tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "common.yaml").write_text("# @package _global_\ntrainer: {nnodes: 7}\n")
    own = "hydra: {searchpath: [pkg://verl.trainer.config]}\ndefaults: [/ppo_trainer, /common, _self_]\n"
    (tmp_path / "exp" / "mine.yaml").write_text(f"# @package _global_\n{own}")
    words = [f"--config-path={tmp_path}", "--config-name=exp/mine", *FLAG]
    assert recipe_of({"arguments": words, "directory": "/"}).compose().trainer.nnodes == 7


@pytest.mark.parametrize(
    ("plugins", "level"), [("none", "refuse"), ("mine, TLT", "ok"), ("Auto", "ok"), ("mine", "refuse")]
)
def test_an_environment_that_keeps_verl_from_loading_the_plugin_is_named(recipe, monkeypatch, plugins, level):
    with open_dict(recipe):
        recipe.trainer.plugin = "tlt"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    found = switched_on(recipe)
    assert found.level == level and ("unset it, or add tlt to it" in found.sentence) == (level == "refuse")


@pytest.mark.parametrize("value", [MOST + 1, -1, 8.0, "two", True])
def test_a_count_that_is_none_is_named_by_its_key(recipe, value):
    recipe.trainer.nnodes = value
    with pytest.raises(TLTConfigError, match=rf"^trainer\.nnodes must be .* to 2,147,483,647, not {value!r}\.$"):
        replicas_on(recipe, "trainer")
