"""`--run-script`: bash carries a script out, and no program of it is started."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.commands.script import run as module
from verl_tlt.commands.script.run import run_script
from verl_tlt.config import TLTConfigError

START = "python3 -u -m verl.trainer.main_ppo"


def test_what_only_a_run_can_tell_is_found_out_and_no_program_is_started(tmp_path, monkeypatch, capfd):
    touched = tmp_path / "touched"
    (folder := tmp_path / f"$(touch {touched.name})").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.chdir(tmp_path)
    (script := tmp_path / "recipe.sh").write_text(
        f"set -e\nexport PATH=/usr/bin:$PATH MINE='two\nlines'\ntouch {touched}\n/usr/bin/touch {touched}\n"
        f"command touch {touched}\nkill -9 1\nX=$(touch {touched})\n"
        "while read -r line; do A+=(\"a.$line=1\"); done <<< $'b\\nc'\n"
        "python -c 'import no_such_module' && D=npu || D=gpu\nray stop --force\n"
        f'cd {folder.parent.parent}\nsleep 100; nohup {START} "${{A[@]}}" d=$D \'it=s a\' "$@" > /dev/null 2>&1 &\n'
    )
    found = run_script(str(script), ["+trainer.plugin=tlt"])
    assert found.overrides == ("a.b=1", "a.c=1", "d=gpu", "it=s a", "+trainer.plugin=tlt")
    assert found.directory == str(folder.parent.parent) and found.environment["MINE"] == "two\nlines"
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
        (f"{START} a=1", "does not hand +tlt=default on to"),
    ],
)  # fmt: skip
def test_what_it_cannot_stand_in_for_is_refused(tmp_path, text, said):
    (script := tmp_path / "recipe.sh").write_text(text)
    with pytest.raises(TLTConfigError) as error:
        run_script(str(script), ["+tlt=default"])
    assert str(script) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_a_program_that_has_no_stand_in_cannot_start_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").write_text("/usr/bin/touch sourced; export PATH=/usr/bin:/bin N=4; touch found\n")
    (script := tmp_path / "recipe.sh").write_text(
        ". ./env.sh\nB='a[$(/usr/bin/touch computed)]'\necho $((B))\n[[ -v $B ]]\nprintf -v \"$B\" x\n"
        "shopt -s expand_aliases\nalias short='/usr/bin/touch alias'\nshort\n"
        f"mapfile -C '/usr/bin/touch map' -c 1 L <<< a\nPS4='$(/usr/bin/touch traced)'\nset -x\n"
        f"eval '/usr/bin/touch eval; touch eval2; {START} n=$N \"$@\"'\n"
    )
    assert run_script(str(script), ["a=1"]).overrides == ("n=4", "a=1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.sh", "recipe.sh"]
    subprocess.run(["bash", script], capture_output=True, timeout=60)
    assert len(list(tmp_path.iterdir())) >= 10, "without the stand-ins each of these starts a program"


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
def test_what_bash_itself_could_do_to_others_is_refused_by_the_kernel(tmp_path, line):
    """In a process of its own, which is the one that a signal is sent to."""
    (script := tmp_path / "recipe.sh").write_text(f"{line}\n{START} a=1\n")
    code = (
        f"import sys\nimport {module.__name__} as module\nmodule.LARGEST = 1_000_000\n"
        "try:\n    module.run_script(sys.argv[1])\nexcept module.TLTConfigError:\n    pass\nprint('alive')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {**os.environ, "PORT": str(server.getsockname()[1])}
        command = [sys.executable, "-c", code, script]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=place, timeout=120)
    assert ended.stdout == "alive\n", ended.stderr
    assert not (tmp_path / "touched").exists()
    assert not (large := tmp_path / "large").exists() or large.stat().st_size <= 1_000_000


def test_what_a_script_prints_takes_neither_disk_nor_memory(tmp_path, monkeypatch):
    """Printing as fast as bash can, in a process whose memory is counted."""
    (script := tmp_path / "recipe.sh").write_text("while :; do printf '%09000d' 1; printf '%09000d' 1 >&2; done\n")
    code = (
        "import os, resource, sys\nfrom verl_tlt.commands.script import run as module\nmodule.LARGEST = 1_000_000\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    module.run_script(sys.argv[1])\nexcept module.TLTConfigError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code, script], capture_output=True, text=True, check=True, timeout=50)
    said, grown_kib = done.stdout.splitlines()
    assert said.startswith(f"{script} does not start") and len(said) < 500 and int(grown_kib) < 50_000
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.sh"] and module.SECONDS == 60.0


def test_processes_of_a_pipeline_are_recorded_one_after_the_other(tmp_path):
    names = " ".join(f"V{i}={'x' * 3000}" for i in range(20))
    (script := tmp_path / "recipe.sh").write_text(f"export {names}\n{START} a=1 | tee b | cat c | tee d\n")
    for _ in range(5):
        found = run_script(str(script))
        assert found.overrides == ("a=1",) and set(found.environment) == {f"V{i}" for i in range(20)}


def test_a_process_that_it_leaves_behind_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)
    (script := tmp_path / "recipe.sh").write_text(f"echo $BASHPID > {tmp_path}/pid\n(while :; do :; done) &\n")
    with pytest.raises(TLTConfigError, match="did not end within 1 s"):
        run_script(str(script))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_without_a_process_for_bash_it_is_one_sentence_and_nothing_stays_open(tmp_path, monkeypatch):
    def popen(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # no more processes for this user

    (script := tmp_path / "recipe.sh").write_text(START)
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TLTConfigError, match=r"^--run-script needs a process .*temporarily unavailable"):
        run_script(str(script))
    assert os.listdir("/proc/self/fd") == before
