"""The commands in the pages are those that exist: taken by the real parser, Makefile and Hydra config."""

import re

import pytest
import typer
from doc_commands import ROOT, commands, overrides

from verl_tlt.checks.recipe import compose
from verl_tlt.commands.cli import app

COMMANDS = commands()


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


@pytest.mark.parametrize("command", of("python", words=1))
def test_a_script_or_module_of_this_repository_exists(command):
    _, first, *rest = command.words
    path = ROOT / (rest[0].replace(".", "/") if first == "-m" else first)
    ours = first != "-c" and (ROOT / path.relative_to(ROOT).parts[0]).is_dir()
    assert not ours or path.is_file() or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("given", overrides_of_commands(), ids=" ".join)
def test_overrides_compose(given):
    config = compose(["actor_rollout_ref.rollout.name=vllm", *given], "ppo_trainer")
    assert config.trainer.plugin == "tlt"


def test_settings_named_in_a_sentence_compose():
    """All at once: Hydra names the one that is wrong."""
    given = overrides()
    assert len(given) > 20
    assert compose([*given, "+trainer.plugin=tlt"], "ppo_trainer").trainer.plugin == "tlt"
