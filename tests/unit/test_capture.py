"""A user's own command, run until it starts `main_ppo`: real bash, real Python, real verl."""

import os
import shlex
import socket
import subprocess
import sys
import sysconfig
from unittest.mock import Mock, patch

import pytest

from verl_tlt.capture import APPEND, MODULES, environment_for, with_appended
from verl_tlt.checks.recipe import Recipe, config_folder
from verl_tlt.commands.capture import capture, check_words, environment_of, recipe_of, run_until_answer, started_in
from verl_tlt.config import TLTConfigError

pytest.importorskip("verl")
MAIN = "verl.trainer.main_ppo"
SITE = sysconfig.get_path("purelib")
SCRIPT = f"""#!/bin/bash
set -eu
trap 'touch trapped' EXIT
unset LEFT_BEHIND
export DATA=/data {MODULES}=${MODULES},csv
made=$(mktemp -d)/made
touch "$made"
cd "$(dirname "$0")/below"
ARGS=(a=1 "names=[x,'y z']")
for seed in 1 2; do
  python3 -m {MAIN} "${{ARGS[@]}}" seed=$seed dir='${{oc.env:DATA}}' made="$made" "$@" | tee log.txt
done
touch after
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script that finds this test's `python3`; returns its path."""
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    (tmp_path / "below").mkdir()

    def write(text):
        file = tmp_path / "recipe.sh"
        file.write_text(text)
        return str(file)

    return write


def test_a_script_is_captured_as_bash_runs_it_and_goes_no_further(script, tmp_path, monkeypatch, capfd):
    (tmp_path / "temporary").mkdir()
    for name, value in (("TMPDIR", f"{tmp_path}/temporary"), ("LEFT_BEHIND", "1"), (MODULES, "json")):
        monkeypatch.setenv(name, value)
    before = started_in()
    found = capture(["bash", script(SCRIPT), "+trainer.plugin=tlt", "x=a b"])
    (made,) = (tmp_path / "temporary").rglob("made")  # it is there, also after the capture
    words = ("a=1", "names=[x,'y z']", "seed=1", "dir=${oc.env:DATA}", f"made={made}", "+trainer.plugin=tlt", "x=a b")
    assert found == Recipe(words) and found.directory == str(tmp_path / "below")
    assert os.environ["DATA"] == "/data" and "LEFT_BEHIND" not in os.environ and os.environ[MODULES] == "json,csv"
    assert before["LEFT_BEHIND"] == "1" and before[MODULES] == "json", "in which `compare` starts its jobs"
    assert os.environ["TMPDIR"] == f"{tmp_path}/temporary"
    assert not any(name.startswith("VERL_TLT") for name in os.environ)
    assert not (tmp_path / "below" / "after").exists() and not (tmp_path / "below" / "trapped").exists()
    assert "nothing is trained" in capfd.readouterr().err


def test_a_script_that_ends_before_what_it_started_in_the_background(script):
    program = f"{SITE}/verl/trainer/main_ppo.py"
    text = f"nohup bash -c 'sleep 0.1; exec python3 {program} a=1' > /dev/null 2>&1 &\nsleep 600 & disown"
    assert capture(["bash", script(text)]).overrides == ("a=1",)


@pytest.fixture(autouse=True)
def stays(monkeypatch, variables):
    """A command under another interpreter goes on in place of this process; here that must not happen."""
    monkeypatch.setattr("verl_tlt.commands.capture.os.execve", None)


def test_under_another_interpreter_the_command_goes_on_where_it_was(script, monkeypatch):
    """With the captured answer, the environment of `main_ppo`, and that in which the user started the command."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    monkeypatch.setattr(sys, "prefix", "/another")
    started = []

    def execve(interpreter, words, environment):
        started.append((interpreter, environment))
        raise OSError(0, "goes on in this process")

    monkeypatch.setattr("verl_tlt.commands.capture.os.execve", execve)
    with pytest.raises(TLTConfigError, match="goes on in this process"):
        capture(["bash", script(f"export LD_LIBRARY_PATH=/own\npython3 -m {MAIN} a=1")])
    ((interpreter, environment),) = started
    assert os.path.samefile(interpreter, sys.executable) and environment["LD_LIBRARY_PATH"] == "/own"
    with patch.dict(os.environ, environment, clear=True):
        assert started_in()["LD_LIBRARY_PATH"] == "/before"
        assert capture(["not", "run", "again"]).overrides == ("a=1",)
        assert os.environ["LD_LIBRARY_PATH"] == "/own" and not any(name.startswith("VERL_TLT") for name in os.environ)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"cd /; PYTHONPATH={SITE} python3 -S -m {MAIN} a=1",
            "starts verl with does not have verl-tlt: install it there.",
        ),
        ("python3 -m verl.trainer.main_eval", f"The command starts verl.trainer.main_eval, not {MAIN}."),
        ("python3 -c 'import verl, ray; ray.init()'", "The command starts python -c, not verl"),
        ("echo nothing to do here; exit 3", "ended with exit status 3 and did not start verl.trainer.main_ppo. Its"),
        (f'env -i PATH="$PATH" python3 -m {MAIN} a=1', f"starts {MAIN} without the variables VERL_TLT_CAPTURE and"),
    ],
    ids=["no verl-tlt", "another trainer", "another main", "no start", "another environment"],
)
def test_a_command_that_does_not_start_main_ppo_is_one_sentence(script, text, said):
    with pytest.raises(TLTConfigError) as error:
        capture(["bash", script(text)])
    assert said in str(error.value)


def test_a_run_that_does_not_answer_and_joins_a_cluster_is_ended(script, overrides):
    """As under a Python without verl-tlt, where the script has other modules in our variable's place."""
    with socket.create_server(("", 0)) as cluster:  # Ray asks at an address of this machine in place of 127.0.0.1
        words = shlex.join(
            [
                *overrides,
                "algorithm.adv_estimator=grpo",
                f"+ray_kwargs.ray_init.address=127.0.0.1:{cluster.getsockname()[1]}",
            ]
        )
        silent = "export VERL_USE_EXTERNAL_MODULES=json VERL_USE_EXTERNAL_PLUGINS=verl_cpu"
        with pytest.raises(TLTConfigError, match=rf"^The command starts {MAIN} without the variables VERL_TLT_CAPTURE"):
            capture(["bash", script(f"{silent}\npython3 -m {MAIN} {words}")])


def test_a_program_that_imports_verl_in_rays_workers_alone_does_not_train(script, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import pathlib, ray\n"
        "def train():\n"
        "    import verl\n"
        f"    pathlib.Path('{tmp_path}/trained').touch()\n"
        "ray.init(num_cpus=1, include_dashboard=False)\n"
        "ray.get(ray.remote(train).remote())\n"
    )
    with pytest.raises(TLTConfigError, match=rf"starts a program that trains in Ray's workers, not {MAIN}\. It was"):
        capture(["python3", str(tmp_path / "mine.py")])
    assert not (tmp_path / "trained").exists()


def test_srun_is_named_where_nothing_answers(tmp_path, monkeypatch):
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TLTConfigError, match=r"another node, which cannot answer: leave srun out"):
        capture(["srun", "-N1", "bash", "recipe.sh"])


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("nowhere", "nowhere cannot be started: No such file or directory."),
        ("./recipe.sh", "Permission denied. If it is a script for bash, write `bash ./recipe.sh`."),
        ("./below", "./below cannot be started: Permission denied. It is a folder."),
        ("A=1", "directory. No shell reads this command: put variables before verl-tlt, and shell code into bash -c"),
        ("source", "No shell reads this command"),
    ],
)
def test_a_command_that_cannot_be_started(script, tmp_path, monkeypatch, program, said):
    script("true")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TLTConfigError) as error:
        capture([program, "a=1"])
    assert said in str(error.value)


def test_an_interrupted_command_shows_what_it_waited_for(script, tmp_path, monkeypatch, capfd):
    def interrupt(tree):
        if (tmp_path / "printed").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("verl_tlt.commands.capture._refuse_training", interrupt)
    with pytest.raises(KeyboardInterrupt):
        capture(["bash", script(f"echo waiting for nodes; touch {tmp_path}/printed; sleep 600")])
    assert f"Ended before it started {MAIN}. Its last lines:\n    waiting for nodes\n" in capfd.readouterr().err


def test_an_interrupt_before_the_command_has_a_log_is_an_interrupt(monkeypatch, capfd):
    monkeypatch.setattr("verl_tlt.commands.capture.running", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_until_answer(["true"], {})
    assert "It printed nothing." in capfd.readouterr().err


def test_a_script_that_loses_the_flag(script):
    with pytest.raises(TLTConfigError, match=rf"^\+trainer.plugin=tlt does not reach {MAIN}: .* pass its arguments on"):
        capture(["bash", script(f"python3 -m {MAIN} a=1"), "+trainer.plugin=tlt"])


@pytest.mark.parametrize(
    ("line", "yes", "said"),
    [
        ("docker run image python3 -m x", True, "has `docker`, which starts programs without the environment"),
        ("/usr/bin/sudo python", True, "recipe.sh has `sudo`"),
        ("ray stop --force; pkill -9 python", False, "the command would also do this: "),
        ("ps aux | grep python | xargs kill -9", False, "recipe.sh: kill. Allow it"),
        ("kill -0 $pid; cd /home/screen; module load singularity; ray stopper; x > $LOG 2>&1 > /dev/null", False, None),
        ("apt-get -y install x", False, "apt-get -y install. Allow it"),
        ("find out -name '*.pt' -delete", False, "-delete. Allow it"),
        ("conda install -y x || uv pip install x", False, "pip install. Allow it"),
        ("conda install -y x || y", False, "conda install. Allow it"),
        ("apptainer exec image.sif python3", True, "recipe.sh has `apptainer exec`"),
        ("rm  -f -r $OUT", False, "recipe.sh: rm  -f -r. Allow it"),
        ("rm --force --recursive $OUT", False, "--recursive. Allow it"),
        ('if [ "$RUNNER" = "docker" ]; then x; fi; case $RUNNER in docker) x;; esac', False, None),
        ('echo "docker is not installed: pip install x" >&2; { echo "see ray stop" >&2; exit 1; }', False, None),
        ("sbatch<<EOF", True, "recipe.sh has `sbatch`"),
        ("X=$(ray stop)||true", False, "recipe.sh: ray stop. Allow it"),
        ("{ uv sync;}", False, "recipe.sh: uv sync. Allow it"),
        ("\\rm -rf $OUT>/dev/null", False, "recipe.sh: rm -rf. Allow it"),
        ("pip3.11 install x", False, "pip3.11 install. Allow it"),
        ("# docker run image", False, None),
        ("python3 train.py  # as in docker run", False, None),
        ("echo 'a # b'; docker run image", True, "recipe.sh has `docker`"),
        ("echo password | sudo -S python3", True, "recipe.sh has `sudo`"),
        ("echo $(ssh host hostname); true", True, "recipe.sh has `ssh`"),
        ("echo no-docker; rm file; ray status; echo my.ssh", False, None),
        ("srun --export=NONE python3 -m x", True, "recipe.sh has `srun --export=NONE`"),
        ("srun -N1 --export=A=1,B=ALL,INSTALL python3", True, "has `srun -N1 --export=A=1,B=ALL,INSTALL`"),
        ("srun --mpi=none --export 'A=1' python3", True, "recipe.sh has `srun --mpi=none --export 'A=1'`"),
        ("srun -N1 \\\n  -n 1 \\\n  --export=$VARS python3", True, "has `srun -N1   -n 1   --export=$VARS`"),
        ("srun --export=ALL python3; srun --export A=1,ALL,B=2 x; srun --export='ALL,A=x y' x", False, None),
        ("srun --export-file=f --export  ALL x; srun x; conda list --export", False, None),
        ("srun -N 1 --mpi pmix python3 convert.py --export onnx", False, None),
        ('srun -N 1 "--export=NONE" python3', True, 'recipe.sh has `srun -N 1 "--export=NONE"`'),
        ("# with srun \\\ndocker run image", True, "line 3 of"),
    ],
)
def test_a_few_words_are_refused_before_anything_runs(script, line, yes, said):
    file = script(f"#!/bin/bash\n{line}\n")
    if said is None:
        check_words(["bash", file], yes)
    else:
        with pytest.raises(TLTConfigError) as error:
            check_words(["bash", file], yes)
        assert said in str(error.value) and file in str(error.value)
    if not yes and said:
        check_words(["bash", file], yes=True)


@pytest.mark.parametrize(
    ("line", "empties"),
    [("x | tee old.log", True), ("x >old.log", True), ("nohup x &> 'old.log' &", True), ("x | tee -a old.log", False),
     ("x >> old.log", False), ("x > none.log", False), ("# x > old.log", False), ("echo 'x > old.log'", False),
     ('echo "x" > "old.log"', True), ('echo "x" | tee "old.log"', True)],
)  # fmt: skip
def test_the_log_of_an_earlier_run_is_not_emptied(script, tmp_path, monkeypatch, line, empties):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.log").write_text("step:1")
    (tmp_path / "none.log").touch()
    if not empties:
        return check_words(["bash", script(line)], yes=False)
    with pytest.raises(TLTConfigError, match=r"line 1 of .*recipe\.sh: empty old\.log\. Allow it with --yes"):
        check_words(["bash", script(line)], yes=False)


def test_a_script_with_windows_line_ends_is_refused(script):
    file = script(f"#!/bin/bash\r\npython3 -m {MAIN} \\\r\n  a=1\r\n")
    with pytest.raises(TLTConfigError, match=r"^Nothing was run: .*recipe\.sh has Windows line ends.*sed -i"):
        capture(["bash", file])


def test_each_shell_script_of_a_command_is_looked_at(script, tmp_path):
    (tmp_path / "launch").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    file = script("ray stop\n")
    for command in (["env", "A=1", "B=2", "nice", "bash", "-x", file], [str(tmp_path / "launch"), "-n", "1", file]):
        with pytest.raises(TLTConfigError, match=r"line 1 of .*recipe.sh: ray stop"):
            check_words(command, yes=False)
    (tmp_path / "launch").write_text("#!/bin/sh\npkill python\n")
    with pytest.raises(TLTConfigError, match=r"line 2 of .*launch: pkill"):
        check_words([str(tmp_path / "launch")], yes=False)


@pytest.mark.parametrize(
    "command",
    [["docker", "run", "image"], ["bash", "-c", "cd x # build\ndocker run image"]],
    ids=["words", "behind a comment"],
)
def test_words_of_the_command_itself_are_looked_at(command):
    with pytest.raises(TLTConfigError, match=r"^Nothing was run: the command has `docker`.*before `python` there"):
        check_words(command, yes=True)


def test_overrides_are_appended_in_no_other_process_than_that_of_main_ppo():
    own = environment_for(APPEND, '["++trainer.total_epochs=77"]', os.environ)
    code = f"import sys, verl_tlt.capture, os; print(sys.argv, '{APPEND}' in os.environ)"  # as verl would import it
    done = subprocess.run([sys.executable, "-c", code, "a"], env=own, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("['-c', 'a'] True\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "appended"),
    [
        (["a=1", "--cfg", "job"], ["a=1", "++b=2", "--cfg", "job"]),
        (["--config-name", "x", "a=1", "~c"], ["--config-name", "x", "a=1", "~c", "++b=2"]),
        (["--config-dir=d"], ["--config-dir=d", "++b=2"]),
        ([], ["++b=2"]),
    ],
)
def test_overrides_stay_in_one_place(words, appended):
    assert with_appended(words, ["++b=2"]) == appended


def test_a_process_whose_environment_cannot_be_read_is_one_sentence(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(TLTConfigError, match=rf"^The environment of {MAIN} cannot be read.*directly before `python`"):
        environment_of(ended.pid, tmp_path)
    with pytest.raises(TLTConfigError, match=r"cannot be read"):
        environment_of(os.getpid(), tmp_path)


def test_hydras_own_options_are_part_of_the_recipe(tmp_path):
    (more := tmp_path / "more").mkdir()
    words = ["--config-path=conf", "--config-name", "mine", "--config-dir", "more", "a=1", "-cn", "mine2"]
    answer = {"arguments": words, "directory": str(tmp_path)}
    searched = Recipe(("a=1", f"hydra.searchpath=[file://{more}]"), "mine2", str(tmp_path), "conf")
    assert recipe_of(answer) == searched
    (more / "mine2.yaml").touch()
    assert recipe_of(answer) == Recipe(
        ("a=1", f"hydra.searchpath=[file://{config_folder('conf')}]"), "mine2", str(tmp_path), str(more)
    )
    (own := tmp_path / "own").mkdir()
    (own / "mine2.yaml").touch()  # Hydra looks here first
    assert recipe_of({**answer, "arguments": [f"--config-path={own}", *words[1:]]}).folder == str(own)


def test_options_that_main_ppo_does_not_train_with_are_refused():
    with pytest.raises(TLTConfigError, match=rf"^{MAIN} does not train with --cfg: "):
        recipe_of({"arguments": ["a=1", "--cfg"], "directory": "/"})
    with pytest.raises(TLTConfigError, match=rf"^{MAIN} cannot read its argument --config-name"):
        recipe_of({"arguments": ["a=1", "--config-name"], "directory": "/"})
    sweep = {"arguments": ["-m", "a=1"], "directory": "/"}
    assert recipe_of(sweep).overrides == ("a=1",)
