"""The commands in the pages are those that exist: taken by the real parser, Makefile, Hydra config and vLLM source."""

import ast
import json
import re
import tomllib

import pytest
import typer
from doc_commands import ROOT, arguments_of, commands, file_of, overrides, script_commands

from verl_tlt.checks.recipe import compose
from verl_tlt.commands.cli import app
from verl_tlt.upstream.versions import location

COMMANDS = commands()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def of(program, *, words=0):
    """The commands of one program with so many words behind its name at least, each once."""
    found = {c.words: c for c in COMMANDS if c.words[0] == program and len(c.words) > words}
    return [pytest.param(c, id=str(c)) for c in found.values()]


def overrides_of_commands():
    """What Hydra would get of the commands that compose a recipe, each set once."""
    taking = {"doctor", "verl.trainer.main_ppo"}
    given = [c.words[1:] for c in COMMANDS if taking & set(c.words[1:3])]
    found = {tuple(word for word in words if "=" in word and not word.startswith("--")) for words in given}
    return sorted(found - {()})


def test_make_has_the_targets():
    targets = re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.words[1] for command in COMMANDS if command.words[0] == "make"} <= set(targets)


@pytest.mark.parametrize("command", of("verl-tlt", words=2))
def test_verl_tlt_takes_these_words(command, monkeypatch):
    group = typer.main.get_command(app)
    called = []
    for name, one in group.commands.items():
        monkeypatch.setattr(one, "callback", lambda name=name, **_: called.append(name))
    group.main(list(command.words[1:]), prog_name="verl-tlt", standalone_mode=False)
    assert called == [command.words[1]]


@pytest.mark.parametrize("command", script_commands(COMMANDS), ids=str)
def test_a_script_has_the_options_that_a_page_gives_it(command):
    """Named in the script or beside it, as an option, a string or a parameter (typer makes an option of it)."""
    text = "".join(path.read_text() for path in file_of(command).parent.glob("*.py"))
    for option in (word for word in arguments_of(command) if word.startswith("--")):
        name = option[2:].replace("-", "_")
        assert any(form in text for form in (option, f'"{name}"', f" {name}: ")), option


@pytest.mark.parametrize("given", overrides_of_commands(), ids=" ".join)
def test_overrides_compose(given):
    config = compose(["actor_rollout_ref.rollout.name=vllm", *given], "ppo_trainer")
    assert config.trainer.plugin == "tlt"


def test_settings_named_in_a_sentence_compose():
    """All at once: Hydra names the one that is wrong."""
    given = overrides()
    assert len(given) > 20
    assert compose([*given, "+trainer.plugin=tlt"], "ppo_trainer").trainer.plugin == "tlt"


def test_a_recipe_reads_what_is_set_in_front_of_it():
    for command in (c for c in COMMANDS if c.words[0].endswith(".sh")):
        script = (ROOT / command.words[0]).read_text()
        assert all(f"${{{name.partition('=')[0]}" in script for name in command.environment), command


@pytest.mark.parametrize("command", of("pip", words=1))
def test_pip_installs_a_clone_a_wheel_or_the_readers_repository(command):
    """Or what the report draws with. The package itself is in no index."""
    _, verb, name, *others = command.words
    place, _, extras = name.rstrip("]").partition("[")
    assert verb == "install"
    if {name, *others} == set(PROJECT["optional-dependencies"]["report"]):
        return
    assert place == "." or re.fullmatch(r"dist/verl_tlt-\*\.whl|git\+https://YOUR-HOST/YOUR-REPOSITORY", place)
    assert set(others) <= {"pytest"}
    assert not extras or set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("command", of("pytest"))
def test_tests_that_are_named_exist(command):
    paths = [ROOT / word for word in command.words[1:] if word.endswith(".py")]
    assert paths and all(path.is_file() for path in paths)
    if "-k" in command.words:
        chosen = command.words[command.words.index("-k") + 1]
        assert any(chosen in path.read_text() for path in paths)


@pytest.mark.parametrize("command", of("vllm", words=2))
def test_vllm_knows_the_speculative_config(command):
    given = json.loads(command.words[command.words.index("--speculative-config") + 1])
    module = ast.parse((location("vllm") / "config" / "speculative.py").read_text())
    config = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeConfig")
    assert set(given) <= {n.target.id for n in config.body if isinstance(n, ast.AnnAssign)}
