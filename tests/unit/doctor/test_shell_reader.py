"""Scripts are read as bash would carry them out: each is also run here, by bash with a Python that notes its words.

What the reader does not understand, `--run-script` finds out: the same sentence of bash is asked of it.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.commands.script.reader import NOT_RUN, REMEDY, read_script
from verl_tlt.commands.script.run import run_script
from verl_tlt.config import TLTConfigError

RUN = 'python3 -m verl.trainer.main_ppo "$@"'
START = "python3 -m verl.trainer.main_ppo"
SCRIPTS = Path(__file__).parents[2] / "data" / "scripts.txt"
"""A small script for each construct, after its name; `run:` are those that need running."""
CONSTRUCTS = dict(part.split("\n", 1) for part in SCRIPTS.read_text().split("### ")[1:])


def told(script, words, environment):
    """What bash gives to a Python that only notes it."""
    place = script.parent / "bin"
    place.mkdir()
    for name in ("python", "python3", "tee"):
        noted = 'printf \'%s\\0\' "$@" >> "$NOTED"' if name != "tee" else "cat > /dev/null"
        (place / name).write_text(f'#!/bin/bash\n[ "$1" = -c ] && exit 1\n{noted}\n')
        (place / name).chmod(stat.S_IRWXU)
    noted = script.parent / "noted"
    env = {**os.environ, **environment, "PATH": f"{place}:/usr/bin:/bin", "NOTED": str(noted)}
    subprocess.run(["bash", str(script), *words], env=env, cwd=script.parent, timeout=60)
    return tuple(noted.read_text().split("\0")[2:-1]) if noted.exists() else None


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_what_is_read_or_found_by_running_is_what_bash_would_do(tmp_path, monkeypatch, name):
    (script := tmp_path / "recipe.sh").write_text(CONSTRUCTS[name])
    monkeypatch.chdir(tmp_path)
    environment = {"SET": "1", "HOME": "/home/some one"}
    own = {
        "run: options of its own": ["--n=1", "--m", "2", "a=1"], "positional": ["8", "/m", "x=1", "y=2"], "set --": []
    }  # fmt: skip
    words = own.get(name, ["x.y=1", "it's=here"])
    if name.startswith("run: "):
        with pytest.raises(TLTConfigError, match=REMEDY):
            read_script(script, words, environment)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        found = run_script(str(script), words)
    else:
        found = read_script(script, words, environment)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.sh"], "something was run"
    assert found.overrides == told(script, words, environment)


PYTHONS = (
    "python3 -u -m verl.trainer.main_ppo",
    "python -X faulthandler -m verl.trainer.main_ppo", "$PYTHON -m verl.trainer.main_ppo",
    "'/an env/bin/python' -m verl.trainer.main_ppo", "/opt/v/bin/python3.11 -um verl.trainer.main_ppo",
    "torchrun --nproc-per-node 1 -m verl.trainer.main_ppo", "uv run --active python -m verl.trainer.main_ppo",
    "conda run -n verl --live-stream python -m verl.trainer.main_ppo", "nohup python -m verl.trainer.main_ppo",
    "env A=1 python -m verl.trainer.main_ppo", "exec python -m verl.trainer.main_ppo",
    "ray job submit --address http://x:8265 -- python3 -m verl.trainer.main_ppo",
    "srun -N 1 python -m verl.trainer.main_ppo", "timeout -k 5 3h nice -n 5 stdbuf -oL python -m verl.trainer.main_ppo",
    "python -m torch.distributed.run --nproc_per_node=1 -m verl.trainer.main_ppo",
    "time -p python -mverl.trainer.main_ppo",
    "printf '%s ' -m verl.trainer.main_ppo c=1; python -m verl.trainer.main_ppo",
    "pkill -f 'python -m verl.trainer.main_ppo'; python -m verl.trainer.main_ppo",
    "if nvidia-smi; then pip install x; fi; sleep 5; CUDA_VISIBLE_DEVICES=0 python -m verl.trainer.main_ppo",
    "hf download x || exit 1; ray stop --force && python -m verl.trainer.main_ppo",
)  # fmt: skip


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("behind", ["", " &", " > log 2>&1 &", " 2>&1 | tee log"])
def test_however_it_is_started(tmp_path, python, behind):
    (script := tmp_path / "run me.sh").write_text(f'PYTHON=/v/bin/python\n{python} a=1 "$@"{behind}\nwait\necho done')
    found = read_script(script, ["+trainer.plugin=tlt"])
    assert found.overrides == ("a=1", "+trainer.plugin=tlt")


@pytest.mark.parametrize(
    "line",
    [
        f"echo b=1 | xargs {START} a=1", f"cat x | nohup xargs -n1 {START} &", f"find . -exec {START} {{}} \\;",
        f"parallel {START} lr={{}} ::: 1 2", f"env -S '{START} a=1' b=2", f"env -C /tmp {START}",
        f"ssh host {START} a=1",
        f"ssh -p 22 host '{START} a=1'; {START} b=1", f"bash -c '{START} a=1'", f"sudo -E {START}", f"./wrap {START}",
        f"docker run -e A=1 image {START}", f"tmux send-keys '{START} a=1' Enter", f"env -i xargs {START}",
        "python -u launcher.py -m verl.trainer.main_ppo", f"trap '{START} a=2' EXIT; {START} a=1",
        f"sbatch --wrap '{START}'", f"flock /tmp/l {START}", "python -m mine -m verl.trainer.main_ppo a=1",
        "python3 -c 'import mine' -m verl.trainer.main_ppo a=1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [read_script, run_script])
def test_a_start_through_what_may_change_its_words_is_refused(tmp_path, monkeypatch, read, line):
    monkeypatch.chdir(tmp_path)
    (script := tmp_path / "recipe.sh").write_text(line)
    with pytest.raises(TLTConfigError) as error:
        read(str(script))
    said = str(error.value)
    assert said.startswith(f"{script} starts verl.trainer.main_ppo through `") and "\n" not in said
    assert said.endswith("give its overrides in place of the script.") and "--run-script" not in said


@pytest.mark.parametrize("read", [read_script, run_script])
def test_variables_that_env_sets_and_drops_are_those_of_the_start(tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THERE", "1")
    text = f"export MINE=1 OTHER=1\nnohup env -u MINE --unset=OTHER TWO=2 {START} a=1"
    (script := tmp_path / "recipe.sh").write_text(text)
    environment = read(str(script)).environment
    assert environment["TWO"] == "2" and not {"MINE", "OTHER", "a"} & set(environment)
    script.write_text(f"export MINE=1\nenv -i TWO=2 {START} a=1")
    assert read(str(script)).environment == {"TWO": "2"}


ENDS = (
    "false", "! true", "false || true", "false && true", "if false; then :; fi", "[ 1 = 2 ]", "[ 1 = 2 ] && X=1",
    "((0))", "(false)", "(false) || true", "{ false; } || true", "{ false; true; }", "X=$(false)", "export X=$(false)",
    "X=$(false; echo hi)", "false &", "false | cat", "false > log 2>&1", "shift", "set +e\nfalse\nset -e",
    "X=$(echo 1)",
    "case x in y) false ;; esac", "if true; then false; fi", "trap 'echo x' ERR", "set -u\necho $NOWHERE", "echo -e x",
    "printf x", ": ${X:=$(false)}", "while false; do true; done", "(exit 1)", "true && false", "set -aux",
)  # fmt: skip


@pytest.mark.parametrize("how", ["set -e", "set -o errexit", "set -x -euo pipefail"])
@pytest.mark.parametrize("line", ENDS)
def test_a_script_that_ends_where_a_command_fails_is_not_read_on(tmp_path, line, how):
    """Bash says whether it comes to its start; a pipeline's end is a program's, so it may be noted in place of that."""
    (script := tmp_path / "recipe.sh").write_text(f"{how}\n{line}\n{START} a=1\n")
    comes_to_it = told(script, [], {}) is not None
    try:
        found = read_script(script)
    except TLTConfigError as error:
        assert not comes_to_it, str(error)
    else:
        assert comes_to_it or found.assumed
        assert not found.assumed or "|" in line


def test_options_of_the_first_line_count(tmp_path):
    (script := tmp_path / "recipe.sh").write_text(f"#!/bin/bash -le\n{START} a=1\nfalse\n")
    assert read_script(script).overrides == ("a=1",)
    script.write_text(f"#!/usr/bin/env -S bash -ex\nfalse\n{START} a=1\n")
    with pytest.raises(TLTConfigError, match=r"`false` \(line 2\) fails, and `set -e` ends it there"):
        read_script(script)


def test_what_a_start_hangs_on_and_was_not_run_is_said(tmp_path):
    lines = [
        "nvidia-smi || true", "hf download x || exit 1", "if ! ray status; then exit 1; fi", "sleep 1; wait &",
        "set -e", "pip install x", "python prepare.py | tee log", "if nvidia-smi; then echo x; fi",
        f"if ray up; then ray job submit --runtime-env=env.yaml -- {START} a=1; else echo no; fi", "ray stop",
    ]  # fmt: skip
    (script := tmp_path / "recipe.sh").write_text("\n".join(lines))
    assert read_script(script).assumed == (
        "`hf download x` (line 2)", "`! ray status` (line 3)", "`pip install x` (line 6)",
        "`python prepare.py | tee log` (line 7)", "`ray up` (line 9)", "`--runtime-env=env.yaml` (line 9)",
    )  # fmt: skip


def test_nothing_of_a_script_is_run_whatever_it_names(tmp_path, monkeypatch):
    touched = tmp_path / "touched"
    (program := tmp_path / "program").write_text(f"#!/bin/sh\ntouch {touched}\n")
    program.chmod(0o755)
    monkeypatch.setenv("TMPDIR", f"/tmp/$(touch {touched})")
    monkeypatch.chdir(tmp_path)
    lines = [
        f"touch {touched}", f"/usr/bin/touch {touched}", f"echo x > {touched}", f"X=$(touch {touched})",
        f"`touch {touched}`",
        str(program), "./program", f"python -c \"open('{touched}', 'w')\"",
        f"trap 'touch {touched}' EXIT",
        f"(touch {touched}) &", f"cat <(touch {touched})", f"{sys.executable} -c \"open('{touched}', 'w')\"",
        f"bash -c 'touch {touched}'",
        f"f() {{ touch {touched}; }}", f"[ -n \"$(touch {touched})\" ] && true", f": > {touched}",
        f"A=$((`touch {touched}`1))",
    ]  # fmt: skip
    (script := tmp_path / "recipe.sh").write_text("\n".join([*lines, RUN]))
    assert read_script(script, ["a=$(touch touched)"]).overrides == ("a=$(touch touched)",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program", "recipe.sh"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist."),
        ("echo hello", "does not start `python -m verl.trainer.main_ppo` here: it ends before."),
        (f"set -u\n{START} $NOWHERE", "NOWHERE: unbound variable"),
        (f": ${{DATA:?say where}}\n{START}", "DATA: say where"),
        (f"cd /no/such/place\n{START}", "the directory /no/such/place (line 1), which is not here"),
        (f"set -e\n[ -f /no ]\n{START} a=1", "here: `[ -f /no ]` (line 2) fails, and `set -e` ends it there."),
        (f"set -o noglob\n{START} a=*", "depends on `set -o noglob` (line 1)"),
        ("bash inner.sh a=1", "here: it starts `bash inner.sh a=1`."),
        ("python prepare.py\ntorchrun -m verl.trainer.sft_trainer x=1",
        "starts `torchrun -m verl.trainer.sft_trainer`."),
        (f"N=$(nvidia-smi -L | wc -l)\n{START} trainer.n_gpus_per_node=$N",
        "takes trainer.n_gpus_per_node from `$(nvidia-smi -L | wc -l)` (line 1)"),
        (f"read -r N < file\n{START} trainer.nnodes=$N", "depends on `read -r N` (line 1)"),
        (f"if grep -q x y; then N=8; fi\n{START} trainer.nnodes=$N",
        "depends on `grep -q x y` (line 1), which decides whether `N=8` is carried out"),
        (f"for f in $(ls); do N=$f; done\n{START} data.train_files=$N", "depends on `for f in $(ls); do N=$f; done`"),
        (f"while read -r l; do A+=($l); done < x\n{START} ${{A[@]}}", "which decides whether `read -r l`"),
        (f"X=$(cut x) && eval 'touch x'\n{START}", "which decides whether `eval 'touch x'` is carried out"),
        (f"eval 'touch x'\n{START}", "depends on `eval touch x` (line 1)"),
        (f"IFS=,\nA=(x $(echo b c))\n{START} ${{A[@]}}", "takes `...` from `IFS`"),
        (f"if nvidia-smi; then {START} a=1; else {START} a=2; fi",
        "depends on `nvidia-smi` (line 1), which decides how it starts"),
        (f"source env.sh\n{START} a=1", "depends on `source env.sh` (line 1)"),
        (f"for lr in 1 2; do {START} lr=$lr; done", "which decides how it starts"),
        (f"{START} lr=1\n{START} lr=2", "starts verl.trainer.main_ppo 2 times, each time otherwise (line 1 and 2)."),
        (f"if true; then\n{START} a=1", "is no bash that can be read"),
        (f"f() {{ f; }}; f\n{START}", "depends on `f` (line 1)"),
        (f"A={'${A:-' * 9000}x{'}' * 9000}\n{START} a=$A", "line 1, cannot be read (RecursionError"),
        (f"export $(grep -v ^# .env | xargs)\n{START} a=1", "depends on `export $(grep -v ^# .env | xargs)` (line 1)"),
        (f"N=$(< nodes)\n{START} trainer.nnodes=$N", "takes trainer.nnodes from `$(< nodes)` (line 1)"),
        (f"for ((i=0; i<3; i++)); do N=$i; done\n{START} trainer.nnodes=$N", "depends on `for ((i=0;"),
        (f"for ((i=0; i<3; i++)); do {START} a=$i; done", "which decides how it starts"),
        (f"printf -v\n{START} a=1", "depends on `printf -v` (line 1)"),
        (f"N=1\r\n{START} a=$N\r\n", "has Windows line ends, which bash takes for parts of words"),
        (f'eval "$(conda shell.bash hook)"\n{START}', "depends on `eval ...` (line 1)"),
        (f": ${{DATA:?not on $(hostname) at all}}\n{START}", "DATA: not on ... at all."),
        *((f"if {test}; then N=8; fi\n{START} trainer.nnodes=$N", f"depends on `{test}` (line 1), which decides")
          for test in ("hash nvidia-smi", "kill -0 $PPID", "shopt -q extglob", "ulimit -n 99", "wait 1")),
        (f"cd $(mktemp -d)\n{START} a=1", "in a directory that is not known"),
        ("X=xxxxxxxxxx" + ";X=$X$X$X" * 30 + f"\n{START} a=$X", "a value of over 1000000 characters (line 1)"),
    ],
)  # fmt: skip
def test_a_script_that_does_not_come_to_it_or_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "recipe.sh"
    if text is not None:
        script.write_text(text)
    with pytest.raises(TLTConfigError) as error:
        read_script(script)
    assert str(script) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_what_a_program_prints_stays_open_where_it_decides_nothing(tmp_path):
    (script := tmp_path / "recipe.sh").write_text(
        f"D=$(date +%Y%m%d)\nexport KEY=$(cat ~/.key) NAME=x\nif ray status; then echo up; fi\n"
        f"{START} trainer.experiment_name=grpo_${{D}} trainer.default_local_dir=/c/$D/x a=1"
    )
    found = read_script(script)
    assert found.overrides == (
        f"trainer.experiment_name=grpo_{NOT_RUN}",
        f"trainer.default_local_dir=/c/{NOT_RUN}/x",
        "a=1",
    )
    assert found.unread == ("KEY",) and found.environment["NAME"] == "x" and "KEY" not in found.environment


@pytest.mark.parametrize(
    ("script", "words", "lost"),
    [
        (f"{START} a=1", ["+trainer.plugin=tlt"], "+trainer.plugin=tlt"),
        (f"{START} a=1 $1", ["+tlt=default", "trainer.nnodes=2"], "trainer.nnodes=2"),
        (f"echo \"$@\"; {START} a=1", ["a.b=1"], "a.b=1"),
        (f"set -- x=1\n{START} \"$@\"", ["8"], "8"),
        (f"N=$1\n{START} n=$N", ["8"], None),
        (f"case $1 in --big) N=8 ;; esac\nshift\n{START} n=$N $@", ["--big", "a=1"], None),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_arrive_is_refused(tmp_path, script, words, lost):
    (file := tmp_path / "recipe.sh").write_text(script)
    if lost is None:
        assert read_script(file, words).overrides
        return
    with pytest.raises(TLTConfigError) as error:
        read_script(file, words)
    assert str(error.value).startswith(f"{file} does not hand {lost} on to verl.trainer.main_ppo")


def test_hydras_own_options_are_understood(tmp_path):
    (script := tmp_path / "recipe.sh").write_text(
        f"cd {tmp_path}\n{START} --config-path=conf --config-name mine --config-dir more a=1 -cn mine2"
    )
    found = read_script(script)
    assert found.config == "conf/mine2" and found.overrides == ("a=1", f"hydra.searchpath=[file://{tmp_path}/more]")
    assert read_script(script, [], {"HOME": "/"}) == found
