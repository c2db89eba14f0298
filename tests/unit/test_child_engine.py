"""The child process of an engine: real children, that do something simpler than an engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import verl_cpu
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands import child_engine
from verl_tlt.commands.child_engine import ChildEngineError, require_cpu_platform, run_job, scratch

CHILD = """
import multiprocessing, os, sys, time
from verl_tlt.commands.child_engine import serve_job
from verl_tlt.errors import TLTError

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
time.sleep(float(os.environ.get("IMPORTS_S", "0")))  # as long as the imports of an engine take

def work(job, directory):
    (directory / "pid").write_text(str(os.getpid()))
    print("the child was here", flush=True)
    match job["do"]:
        case "answer": return {"sum": sum(job["numbers"]), "said": os.environ.get("SAID"), "starts": os.environ[METHOD]}
        case "refuse": raise TLTError("No such policy.")
        case "crash": raise MemoryError("no room for the weights")
        case "vanish": os._exit(0)
        case "hang":
            engine = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)  # as vLLM starts its own
            engine.start()
            (directory / "folder").write_text(os.environ["TMPDIR"])
            (directory / "engine").write_text(str(engine.pid))
            time.sleep(600)

if __name__ == "__main__":
    serve_job(work)
"""


@pytest.fixture(autouse=True)
def child(tmp_path, monkeypatch):
    (tmp_path / "simple_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(child_engine.__file__).parents[1]}")
    monkeypatch.setattr(child_engine, "POLL_S", 0.05)


def ask(directory, timeout_s=60.0, tell=lambda: None, **job):
    return run_job("simple_child", job, directory, {"SAID": "hello"}, timeout_s, tell)


def has_ended(directory, name="pid"):
    pid = int((directory / name).read_text())
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for(condition):
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_job_is_answered_where_a_users_file_has_the_name_of_a_module(tmp_path, monkeypatch):
    (notes := tmp_path / "notes").mkdir()
    (notes / "json.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(notes)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    told = []
    answer = ask(tmp_path / "job", tell=lambda: told.append(1), do="answer", numbers=[1, 2])
    assert answer == {"sum": 3, "said": "hello", "starts": "spawn"}, "the GPUs were counted: no fork can use them"
    assert told and "the child was here" in (tmp_path / "job" / child_engine.LOG).read_text()


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("refuse", r"^No such policy\.$"),
        ("crash", r"ended early.*engine.log(?s:.*)MemoryError: no room for the weights"),
        ("vanish", "ended early"),
        ("hang", "was not done after 5 s"),
    ],
)
def test_what_gives_no_answer_is_a_sentence_and_an_earlier_answer_is_nobodys(tmp_path, job, said):
    (tmp_path / "answer.json").write_text("{}")
    with pytest.raises(ChildEngineError, match=said):
        ask(tmp_path, timeout_s=5.0 if job == "hang" else 60.0, do=job)
    assert has_ended(tmp_path)


def test_an_engine_on_the_cpu_needs_the_platforms_variables(monkeypatch):
    require_cpu_platform()
    monkeypatch.delenv("VERL_PLATFORM")
    with pytest.raises(ChildEngineError, match=r"export \$\(python -m verl_cpu.environment\)"):
        require_cpu_platform()
    code = [sys.executable, "-m", "verl_cpu.environment"]
    said = subprocess.run(code, cwd=Path(verl_cpu.__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert dict(word.split("=") for word in said.stdout.split()) == CPU_ENGINE


@pytest.mark.parametrize(("imports_s", "end"), [(0, signal.SIGKILL), (0, signal.SIGTERM), (2, signal.SIGKILL)])
def test_it_ends_with_its_parent_and_so_do_its_own_processes(tmp_path, monkeypatch, imports_s, end):
    monkeypatch.setenv("IMPORTS_S", str(imports_s))
    code = (
        "from pathlib import Path; from verl_tlt.commands.child_engine import run_job;"
        f"run_job('simple_child', {{'do': 'hang'}}, Path({str(tmp_path)!r}), {{}})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    log, started = tmp_path / child_engine.LOG, tmp_path / "engine"
    wait_for(lambda: log.is_file() and (imports_s or (started.is_file() and started.read_text())))
    parent.send_signal(end)
    parent.wait()
    if imports_s:
        wait_for(lambda: "that started this engine has ended" in log.read_text())
    else:
        wait_for(lambda: has_ended(tmp_path) and has_ended(tmp_path, "engine"))
        assert Path((tmp_path / "folder").read_text()).exists() == (end == signal.SIGKILL)


@pytest.mark.parametrize(("job", "stays"), [("crash", True), ("refuse", False)])
def test_the_log_that_a_sentence_names_stays_and_nothing_else(tmp_path, monkeypatch, job, stays):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ChildEngineError) as error, scratch() as folder:
        ask(folder, do=job)
    logs = list(tmp_path.glob("*/engine.log"))
    assert [str(log) in str(error.value) for log in logs] == [True] * stays and not folder.exists()
    assert not stays or "MemoryError" in logs[0].read_text()
