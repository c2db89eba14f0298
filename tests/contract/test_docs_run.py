"""What pages tell a reader to type: scripts take the arguments that a page gives them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from doc_commands import arguments_of, commands, file_of, script_commands  # noqa: E402

COMMANDS = script_commands(commands())
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
