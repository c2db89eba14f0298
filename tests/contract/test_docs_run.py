"""What pages tell a reader to type, run as written: commands that need no engine, scripts as far as their arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_row import one_row

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from doc_commands import PLACEHOLDER, arguments_of, commands, file_of, script_commands  # noqa: E402
from made_run import make_run  # noqa: E402
from policy_config import write_policy  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from verl_tlt.commands.cli import app  # noqa: E402
from verl_tlt.commands.doctor import command  # noqa: E402

STOCK = {
    "timing_s/gen": 80.0, "timing_s/step": 100.0, "response_length/mean": 300.0, "response_length/max": 1500.0,
}  # fmt: skip
"""What verl logs of a step."""
COMMANDS = script_commands(commands())
WITHOUT_ENGINE = ("advise", "doctor", "report", "switch")
"""Commands of `verl-tlt` that start nothing."""
PARSE = """
import argparse, contextlib, io, json, runpy, sys
import typer

class Parsed(Exception):
    pass

def parse_args(self, *args, **kwargs):
    if unknown := known(self, *args, **kwargs)[1]:
        self.error(f"unrecognized arguments: {unknown}")
    raise Parsed

def parse_known_args(self, *args, **kwargs):
    known(self, *args, **kwargs)
    raise Parsed

def run(function):  # as typer.run, without calling the function
    app = typer.Typer()
    app.command()(function)
    command = typer.main.get_command(app)
    command.callback = lambda **_: None
    command.main(sys.argv[1:], standalone_mode=True)

known = argparse.ArgumentParser.parse_known_args
argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = parse_args, parse_known_args
typer.run = run
before = sys.path[1:]
for file, module, arguments in json.load(sys.stdin):
    sys.argv, sys.path[:] = [file, *arguments], ["" if module else file.rpartition("/")[0], *before]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            run_file = runpy.run_module if module else runpy.run_path
            run_file(module or file, run_name="__main__")
        verdict = "ran without parsing its arguments" if arguments else ""
    except Parsed:
        verdict = ""
    except SystemExit as end:
        verdict = said.getvalue() if end.code else ""
    print(json.dumps([file, arguments, verdict]), flush=True)
"""
WITHOUT_ARGUMENTS = {"docs/generate.py", "recipes/tables.py"}
"""Scripts that parse nothing: they would run."""


@pytest.fixture(scope="module")
def verdicts():
    """What each script says of the arguments; all in one process, because most of the time is imports."""
    asked = [
        (str(file_of(c)), c.words[2] if c.words[1] == "-m" else None, arguments_of(c))
        for c in COMMANDS
        if str(file_of(c).relative_to(ROOT)) not in WITHOUT_ARGUMENTS
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VERL_ENGINE_DEVICE": "cuda"}
    how = {"capture_output": True, "text": True, "env": environment, "cwd": ROOT, "timeout": 600}
    done = subprocess.run([sys.executable, "-c", PARSE], input=json.dumps(asked), **how)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(asked), done.stderr[-2000:]
    return {(file, *arguments): verdict for file, arguments, verdict in found}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_script_takes_what_the_page_gives_it(command, verdicts):
    words = arguments_of(command)
    if str(file_of(command).relative_to(ROOT)) in WITHOUT_ARGUMENTS:
        assert not words and "argparse" not in file_of(command).read_text()
    else:
        assert verdicts[(str(file_of(command)), *words)] == ""


def without_engine():
    """What can be run, each once however its placeholders are called."""
    found = {}
    for c in commands():
        words = tuple(PLACEHOLDER if word in ("TRACE_DIR", "DIR") else word for word in c.words[1:])
        starts_nothing = words[:1] and words[0] in WITHOUT_ENGINE and "--gpu" not in words
        if c.words[0] == "verl-tlt" and starts_nothing and (c.whole or len(words) > 1):
            found.setdefault(words, c)
    return [pytest.param(words, id=str(c)) for words, c in found.items()]


@pytest.fixture(scope="module")
def placeholders(tmp_path_factory):
    """What stands for `<your recipe>` in a call of the doctor, and for a trace directory elsewhere."""
    root = tmp_path_factory.mktemp("reader")
    make_run(root / "run" / "tlt_trace")
    policy = root / "toy"  # what the run's trace calls it
    write_policy(policy, max_position_embeddings=2048)
    data = [f"data.{kind}_files={one_row(root / 'train.parquet')}" for kind in ("train", "val")]
    recipe = ["actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.model.path={policy}", *data]
    traced = [str(root / "run" / "tlt_trace")]
    small = [*recipe, "data.train_batch_size=16", "trainer.n_gpus_per_node=4", "data.max_response_length=2048"]
    return {"advise": small, "doctor": [*recipe, "trainer.device=cpu"], "report": traced, "switch": traced}


@pytest.fixture(scope="module")
def symbols():
    """What the doctor reads out of verl's and vLLM's sources, once: it takes seconds."""
    return {package: command.check_symbols(package) for package in ("verl", "vllm")}


@pytest.mark.parametrize("words", without_engine())
def test_a_command_without_an_engine_runs_as_written(words, placeholders, symbols, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": STOCK}))
    (tmp_path / "tlt_trace").symlink_to(placeholders["report"][0])
    monkeypatch.setattr(command, "check_symbols", lambda package, root=None: symbols[package])
    mine = placeholders[words[0]]
    typed = [part for word in words for part in (mine if word == PLACEHOLDER else (word,))]
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
