"""Scripts are read as bash would carry them out; those that cannot be read are run by it, and no program is started.

Constructs are also run here by bash, with a Python that notes its words.
"""

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.commands.script import run as module
from verl_tlt.commands.script.reader import NOT_RUN, REMEDY, read_script
from verl_tlt.commands.script.run import run_script
from verl_tlt.config import TLTConfigError

START = "python3 -m verl.trainer.main_ppo"
SCRIPTS = Path(__file__).parents[2] / "data" / "scripts.txt"
"""A small script for each construct, after its name; `run:` are those that need running."""
CONSTRUCTS = dict(part.split("\n", 1) for part in SCRIPTS.read_text().split("### ")[1:])
OWN_WORDS = {"run: options of its own": ["--n=1", "--m", "2", "a=1"], "positional": ["8", "/m", "x=1"], "set --": []}
BOTH = pytest.mark.parametrize("read", [read_script, run_script])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into an empty folder, in which the test then is."""
    monkeypatch.chdir(tmp_path)

    def write(*lines):
        (path := tmp_path / "recipe.sh").write_text("\n".join(lines))
        return path

    return write


def refusal(read, script, *words):
    """The sentence with which a script is refused."""
    with pytest.raises(TLTConfigError) as error:
        read(str(script), words)
    sentence = str(error.value)
    assert str(script) in sentence and "\n" not in sentence
    return sentence


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
def test_what_is_read_or_found_by_running_is_what_bash_would_do(script, monkeypatch, name):
    path, environment = script(CONSTRUCTS[name]), {"SET": "1", "HOME": "/home/some one"}
    words = OWN_WORDS.get(name, ["x.y=1", "it's=here"])
    if name.startswith("run: "):
        with pytest.raises(TLTConfigError, match=REMEDY):
            read_script(path, words, environment)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        found = run_script(str(path), words)
    else:
        found = read_script(path, words, environment)
    assert os.listdir() == ["recipe.sh"], "something was run"
    assert found.overrides == told(path, words, environment)


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
    (path := tmp_path / "run me.sh").write_text(f'PYTHON=/v/bin/python\n{python} a=1 "$@"{behind}\nwait\necho done')
    assert read_script(path, ["+trainer.plugin=tlt"]).overrides == ("a=1", "+trainer.plugin=tlt")


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
@BOTH
def test_a_start_through_what_may_change_its_words_is_refused(script, read, line):
    said = refusal(read, path := script(line))
    assert said.startswith(f"{path} starts verl.trainer.main_ppo through `")
    assert said.endswith("give its overrides in place of the script.") and "--run-script" not in said


@BOTH
def test_variables_that_env_sets_and_drops_are_those_of_the_start(script, monkeypatch, read):
    monkeypatch.setenv("THERE", "1")
    path = script("export MINE=1 OTHER=1", f"nohup env -u MINE --unset=OTHER TWO=2 {START} a=1")
    environment = read(str(path)).environment
    assert environment["TWO"] == "2" and not {"MINE", "OTHER", "a"} & set(environment)
    path = script("export MINE=1", f"env -i TWO=2 {START} a=1")
    assert read(str(path)).environment == {"TWO": "2"}


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
def test_a_script_that_ends_where_a_command_fails_is_not_read_on(script, line, how):
    """Bash says whether it comes to its start; a pipeline's end is a program's, so it may be noted in place of that."""
    path = script(how, line, f"{START} a=1\n")
    comes_to_it = told(path, [], {}) is not None
    try:
        found = read_script(path)
    except TLTConfigError as error:
        assert not comes_to_it, str(error)
    else:
        assert comes_to_it or found.assumed
        assert not found.assumed or "|" in line


def test_options_of_the_first_line_count(script):
    assert read_script(script("#!/bin/bash -le", f"{START} a=1", "false")).overrides == ("a=1",)
    said = refusal(read_script, script("#!/usr/bin/env -S bash -ex", "false", f"{START} a=1"))
    assert "`false` (line 2) fails, and `set -e` ends it there" in said


def test_what_a_start_hangs_on_and_was_not_run_is_said(script):
    lines = [
        "nvidia-smi || true", "hf download x || exit 1", "if ! ray status; then exit 1; fi", "sleep 1; wait &",
        "set -e", "pip install x", "python prepare.py | tee log", "if nvidia-smi; then echo x; fi",
        f"if ray up; then ray job submit --runtime-env=env.yaml -- {START} a=1; else echo no; fi", "ray stop",
    ]  # fmt: skip
    assert read_script(script(*lines)).assumed == (
        "`hf download x` (line 2)", "`! ray status` (line 3)", "`pip install x` (line 6)",
        "`python prepare.py | tee log` (line 7)", "`ray up` (line 9)", "`--runtime-env=env.yaml` (line 9)",
    )  # fmt: skip


def test_nothing_of_a_script_is_run_whatever_it_names(script, tmp_path, monkeypatch):
    touched = tmp_path / "touched"
    (program := tmp_path / "program").write_text(f"#!/bin/sh\ntouch {touched}\n")
    program.chmod(0o755)
    monkeypatch.setenv("TMPDIR", f"/tmp/$(touch {touched})")
    lines = [
        f"touch {touched}", f"/usr/bin/touch {touched}", f"echo x > {touched}", f"X=$(touch {touched})",
        f"`touch {touched}`", str(program), "./program", f"python -c \"open('{touched}', 'w')\"",
        f"trap 'touch {touched}' EXIT", f"(touch {touched}) &", f"cat <(touch {touched})",
        f"{sys.executable} -c \"open('{touched}', 'w')\"", f"bash -c 'touch {touched}'",
        f"f() {{ touch {touched}; }}", f"[ -n \"$(touch {touched})\" ] && true", f": > {touched}",
        f"A=$((`touch {touched}`1))", f'{START} "$@"',
    ]  # fmt: skip
    assert read_script(script(*lines), ["a=$(touch touched)"]).overrides == ("a=$(touch touched)",)
    assert sorted(os.listdir()) == ["program", "recipe.sh"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "does not start `python -m verl.trainer.main_ppo` here: it ends before."),
        (f"set -u\n{START} $NOWHERE", "NOWHERE: unbound variable"),
        (f": ${{DATA:?say where}}\n{START}", "DATA: say where"),
        (f"cd /no/such/place\n{START}", "the directory /no/such/place (line 1), which is not here"),
        (f"set -e\n[ -f /no ]\n{START} a=1", "here: `[ -f /no ]` (line 2) fails, and `set -e` ends it there."),
        (f"set -o noglob\n{START} a=*", "depends on `set -o noglob` (line 1)"),
        ("bash inner.sh a=1", "here: it starts `bash inner.sh a=1`."),
        ("python prepare.py\ntorchrun -m verl.trainer.sft_trainer x=1", "starts `torchrun -m verl.trainer.sft_t"),
        (f"N=$(nvidia-smi -L | wc -l)\n{START} trainer.n_gpus_per_node=$N",
        "takes trainer.n_gpus_per_node from `$(nvidia-smi -L | wc -l)` (line 1)"),
        (f"read -r N < file\n{START} trainer.nnodes=$N", "depends on `read -r N` (line 1)"),
        (f"if grep -q x y; then N=8; fi\n{START} trainer.nnodes=$N",
        "depends on `grep -q x y` (line 1), which decides whether `N=8` is carried out"),
        (f"if nvidia-smi; then : ${{N:=8}}; fi\n{START} a=$N", "which decides whether `${N:=8}` is carried out"),
        (f"for f in $(ls); do N=$f; done\n{START} data.train_files=$N", "depends on `for f in $(ls); do N=$f; done`"),
        (f"while read -r l; do A+=($l); done < x\n{START} ${{A[@]}}", "which decides whether `read -r l`"),
        (f"X=$(cut x) && eval 'touch x'\n{START}", "which decides whether `eval 'touch x'` is carried out"),
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
def test_a_script_that_does_not_come_to_it_or_cannot_be_read_is_one_sentence(script, text, said):
    assert said in refusal(read_script, script(text))


def test_what_a_program_prints_stays_open_where_it_decides_nothing(script):
    lines = ["D=$(date +%Y%m%d)", "export KEY=$(cat ~/.key) NAME=x", "if ray status; then echo up; fi"]
    names = "trainer.experiment_name=g_${D} trainer.default_local_dir=/c/$D/x"
    found = read_script(script(*lines, f"{START} {names} a=1"))
    known = (f"trainer.experiment_name=g_{NOT_RUN}", f"trainer.default_local_dir=/c/{NOT_RUN}/x", "a=1")
    assert found.overrides == known
    assert found.unread == ("KEY",) and found.environment["NAME"] == "x" and "KEY" not in found.environment


@pytest.mark.parametrize(
    ("text", "words", "lost"),
    [
        (f"{START} a=1", ["+trainer.plugin=tlt"], "+trainer.plugin=tlt"),
        (f"{START} a=1 $1", ["+trainer.plugin=tlt", "trainer.nnodes=2"], "trainer.nnodes=2"),
        (f"echo \"$@\"; {START} a=1", ["a.b=1"], "a.b=1"),
        (f"set -- x=1\n{START} \"$@\"", ["8"], "8"),
        (f"N=$1\n{START} n=$N", ["8"], None),
        (f"case $1 in --big) N=8 ;; esac\nshift\n{START} n=$N $@", ["--big", "a=1"], None),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_arrive_is_refused(script, text, words, lost):
    path = script(text)
    if lost is None:
        assert read_script(path, words).overrides
    else:
        assert f"{path} does not hand {lost} on to verl.trainer.main_ppo" in refusal(read_script, path, *words)


def test_hydras_own_options_are_understood(script, tmp_path):
    options = "--config-path=conf --config-name mine --config-dir more a=1 -cn mine2"
    found = read_script(path := script(f"cd {tmp_path}", f"{START} {options}"))
    assert found.config == "conf/mine2" and found.overrides == ("a=1", f"hydra.searchpath=[file://{tmp_path}/more]")
    assert read_script(path, [], {"HOME": "/"}) == found


# ---------------------------------------------------------------------- --run-script


def test_what_only_a_run_can_tell_is_found_out_and_no_program_is_started(script, tmp_path, monkeypatch, capfd):
    touched = tmp_path / "touched"
    (folder := tmp_path / f"$(touch {touched.name})").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    path = script(
        "set -e", "export PATH=/usr/bin:$PATH MINE='two\nlines'", f"touch {touched}", f"/usr/bin/touch {touched}",
        f"command touch {touched}", "kill -9 1", f"X=$(touch {touched})",
        "while read -r line; do A+=(\"a.$line=1\"); done <<< $'b\\nc'",
        "python -c 'import no_such_module' && D=npu || D=gpu", "ray stop --force", f"cd {tmp_path.parent}",
        f"sleep 100; nohup {START} \"${{A[@]}}\" d=$D 'it=s a' \"$@\" > /dev/null 2>&1 &",
    )  # fmt: skip
    found = run_script(str(path), ["+trainer.plugin=tlt"])
    assert found.overrides == ("a.b=1", "a.c=1", "d=gpu", "it=s a", "+trainer.plugin=tlt")
    assert found.directory == str(tmp_path.parent) and found.environment["MINE"] == "two\nlines"
    assert not touched.exists() and "TLT_RECORD" not in found.environment
    said = capfd.readouterr().err
    assert all(name in said for name in ("touch", "ray", "files is written")) and "kill" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$PYTHON -m verl.trainer.main_ppo", "line 1, names a program by what is only known when it runs"),
        ("'/bin/a b' x", "line 1, names a program by what is only known when it runs"),
        ("echo hello", "does not start `python -m verl.trainer.main_ppo` here: it ends before."),
        (f"set -u\n{START} $NOWHERE", "NOWHERE: unbound variable."),
        (f"{START} a=1", "does not hand +trainer.plugin=tlt on to"),
    ],
)
def test_what_it_cannot_stand_in_for_is_refused(script, text, said):
    assert said in refusal(run_script, script(text), "+trainer.plugin=tlt")


def test_a_program_that_has_no_stand_in_cannot_start_either(script, tmp_path):
    (tmp_path / "env.sh").write_text("/usr/bin/touch sourced; export PATH=/usr/bin:/bin N=4; touch found\n")
    path = script(
        ". ./env.sh", "B='a[$(/usr/bin/touch computed)]'", "echo $((B))", "[[ -v $B ]]", 'printf -v "$B" x',
        "shopt -s expand_aliases", "alias short='/usr/bin/touch alias'", "short",
        "mapfile -C '/usr/bin/touch map' -c 1 L <<< a", "PS4='$(/usr/bin/touch traced)'", "set -x",
        f"eval '/usr/bin/touch eval; touch eval2; {START} n=$N \"$@\"'\n",
    )  # fmt: skip
    assert run_script(str(path), ["a=1"]).overrides == ("n=4", "a=1")
    assert sorted(os.listdir()) == ["env.sh", "recipe.sh"]
    subprocess.run(["bash", path], capture_output=True, timeout=60)
    assert len(os.listdir()) >= 10, "without the stand-ins each of these starts a program"


def run_apart(script, **options):
    """What is printed by a process that runs a script; the first lines are of a refusal, the last its growth in KiB."""
    code = (
        "import resource, sys\nfrom verl_tlt.commands.script import run as module\nmodule.LARGEST = 1_000_000\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    module.run_script(sys.argv[1])\nexcept module.TLTConfigError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, check=True, timeout=120, **options
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "export -n $(compgen -e); eval '/usr/bin/touch touched'",
        "declare +x $(compgen -e); eval '/usr/bin/touch touched'",
        "builtin exec -c /usr/bin/touch touched",
        "(builtin exec /usr/bin/touch touched)",
        "unset -f exec touch; PATH=/usr/bin:/bin; (exec -c /usr/bin/touch touched); touch touched",
        "builtin kill -9 $PPID",
        "unset -f kill; kill -9 $PPID",
        "builtin ulimit -f unlimited; printf '%03000000d' 1 > large",
        "eval 'exec 7<> /dev/tcp/127.0.0.1/$PORT' && : > touched",
    ],
)
def test_what_bash_itself_could_do_to_others_is_refused_by_the_kernel(script, tmp_path, line):
    """In a process of its own, which is the one that a signal is sent to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        run_apart(script(line, f"{START} a=1\n"), env={**os.environ, "PORT": str(server.getsockname()[1])})
    assert not (tmp_path / "touched").exists()
    assert not (large := tmp_path / "large").exists() or large.stat().st_size <= 1_000_000


def test_what_a_script_prints_takes_neither_disk_nor_memory(script, monkeypatch, tmp_path):
    """Printing as fast as bash can, in a process whose memory is counted."""
    path = script("while :; do printf '%09000d' 1; printf '%09000d' 1 >&2; done\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said, grown_kib = run_apart(path)
    assert said.startswith(f"{path} does not start") and len(said) < 500 and int(grown_kib) < 50_000
    assert os.listdir() == ["recipe.sh"] and module.SECONDS == 60.0


def test_processes_of_a_pipeline_are_recorded_one_after_the_other(script):
    names = " ".join(f"V{i}={'x' * 3000}" for i in range(20))
    path = script(f"export {names}", f"{START} a=1 | tee b | cat c | tee d\n")
    for _ in range(5):
        found = run_script(str(path))
        assert found.overrides == ("a=1",) and set(found.environment) == {f"V{i}" for i in range(20)}


def test_a_process_that_it_leaves_behind_is_ended(script, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)
    assert "did not end within 1 s" in refusal(run_script, script("echo $BASHPID > pid", "(while :; do :; done) &\n"))
    assert not Path(f"/proc/{Path('pid').read_text().strip()}").exists()


def test_without_a_process_for_bash_it_is_one_sentence_and_nothing_stays_open(script, monkeypatch):
    def popen(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # no more processes for this user

    path, before = script(START), os.listdir("/proc/self/fd")
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    with pytest.raises(TLTConfigError, match=r"^--run-script needs a process .*temporarily unavailable"):
        run_script(str(path))
    assert os.listdir("/proc/self/fd") == before
