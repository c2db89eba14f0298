"""Numbers given to commands: what is none, or out of bounds, is refused by the command line, naming the option."""

import re
import shlex
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from verl_tlt.commands.cli import app

COMMANDS = get_command(app).commands
MAY_BE_ZERO = {"temperature", "top_k", "seed", "cache_gb"}


def parsed(name, option, value):
    """What a command makes of one option; raises where it is refused."""
    words = [option.opts[0], value]
    for other in COMMANDS[name].params:
        if other.required and other is not option:
            words += ["x"] if other.param_type_name == "argument" else [other.opts[0], "x"]
    return COMMANDS[name].make_context(name, words).params[option.name]


def is_number(name, option):
    try:
        return isinstance(parsed(name, option, "1"), int | float)
    except Exception:  # typer's own, whose module is private
        return isinstance(parsed(name, option, "2"), int | float)


NUMBERS = [
    (name, option)
    for name, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option" and not option.is_flag and is_number(name, option)
]
assert len(NUMBERS) > 20


@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_number_is_a_number_within_bounds(name, option):
    refused = ["-1", "word"]
    refused += [] if option.name in MAY_BE_ZERO else ["0"]
    for value in refused:
        with pytest.raises(Exception) as caught:
            parsed(name, option, value)
        assert type(caught.value).__name__ == "BadParameter", (value, caught.value)
        assert option.opts[0] in caught.value.format_message()


@pytest.mark.parametrize(
    ("packages", "words", "said"),
    [
        ("rich", "doctor", "rich is not installed here, and verl-tlt or verl needs it: pip install rich"),
        ("matplotlib", "report RUN --out o", "No page: pip install 'verl-tlt[report]' to have it drawn."),
        ("jinja2", "report RUN --out o", "No page: pip install 'verl-tlt[report]' to have it drawn."),
        ("vllm", "warmup --model m --prompts p --out o", "Install vllm: this command needs it."),
        ("jinja2 matplotlib vllm", "compare a.b=1", "Install vllm: this command needs it."),
    ],
)
def test_a_package_that_is_missing_is_named_and_nothing_is_written(made_run, tmp_path, packages, words, said):
    argv = words.replace("RUN", str(made_run.directory)).split()
    missing = dict.fromkeys(packages.split())
    code = f"import sys; sys.modules.update({missing}); from verl_tlt.commands.cli import app; app({argv})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 1 and ended.stderr.startswith(said) and len(ended.stderr.splitlines()) == 1
    assert ("accept" in ended.stdout) == words.startswith("report"), "the run's table"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_the_command_line_takes(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    examples = re.findall(rf"^ +verl-tlt {name}(.*)$", shown, re.MULTILINE)
    assert examples and "<bool>" not in shown
    for example in examples:
        COMMANDS[name].make_context(name, shlex.split(example))
