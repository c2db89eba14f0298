"""Pages: links resolve, generated parts equal what they are made from, and commands are those that exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

import verl_tlt
from verl_tlt.checks.recipe import compose
from verl_tlt.commands.cli import app

ROOT = Path(verl_tlt.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
    *sorted(DOCS.glob("*.md")),
]
PROGRAMS = ("verl-tlt ", "make ", "python ")
"""A code span that begins with one of these is a command."""
GROUPS = "tlt|trainer|actor_rollout_ref|algorithm|data|reward|ray_kwargs"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def spans(page):
    """The code spans of a page, line ends as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text()))]


def command_lines(page):
    """The lines of its shell blocks, and code spans that begin with a command."""
    for language, text in FENCED.findall(page.read_text()):
        yield from text.replace("\\\n", " ").splitlines() if language == "bash" else ()
    yield from (span for span in spans(page) if re.match(r"[A-Z_]+=\S* [a-z]", span) or span.startswith(PROGRAMS))


def words_of(line):
    """Without what is set in front of the command; `<your recipe>` and the like are one word."""
    words = shlex.split(re.sub(r"<[a-z][^>]*>", "PLACEHOLDER", line), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return tuple(word.removeprefix(".venv/bin/") for word in words if word != "...")


COMMANDS = sorted({words for page in PAGES for line in command_lines(page) if (words := words_of(line))})


def of(program, least):
    """The commands of one program with so many words at least."""
    return [words for words in COMMANDS if words[0] == program and len(words) >= least]


def overrides_of_commands():
    """What Hydra would get of the commands that compose a recipe, each set once."""
    given = [words[1:] for words in COMMANDS if {"doctor", "verl.trainer.main_ppo"} & {*words[1:3]}]
    found = {tuple(word for word in words if "=" in word and not word.startswith("--")) for words in given}
    return sorted(found - {()})


@pytest.fixture
def docs_module(monkeypatch):
    """A module of docs/, by name."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module


def test_the_page_of_settings_is_what_is_generated(docs_module):
    generate = docs_module("generate")
    assert generate.PAGE.read_text() == generate.render(), "run `python docs/generate.py`"


def test_tables_of_runs_go_without_accept_lengths_of_steps_that_drafted_nothing(docs_module):
    parts = docs_module("tables.parts")
    lengths = [None, 1.5, 2.5, None, *(None,) * 4]
    steps = [{"step": i, "accept_length": length, "reward": 0.5} for i, length in enumerate(lengths, start=2)]
    assert "| accept length | 2.00 | |" in parts._in_the_run({"steps": steps})


def test_the_figures_in_tables_are_those_of_the_files(docs_module):
    tables = docs_module("tables")
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == [tables.render(page) for page in pages], "run `python docs/generate.py`"
    assert {block[0] for block in tables.BLOCK.findall("".join(pages))} == set(tables.TABLES)


def test_no_file_of_results_names_a_folder_of_a_machine():
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    folder = r"(?<![\w.])/(home|root|tmp|work|mnt|Users)/"
    assert not [path.name for path in files if re.search(folder, path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE) if anchor else ()
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{page.name} links to {target}"


def test_make_has_the_targets():
    targets = re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {words[1] for words in of("make", 2)} <= set(targets)


@pytest.mark.parametrize("words", of("verl-tlt", 3), ids=" ".join)
def test_verl_tlt_takes_these_words(words, monkeypatch):
    group = typer.main.get_command(app)
    called = []
    for name, one in group.commands.items():
        monkeypatch.setattr(one, "callback", lambda name=name, **_: called.append(name))
    group.main(list(words[1:]), prog_name="verl-tlt", standalone_mode=False)
    assert called == [words[1]]


@pytest.mark.parametrize("words", of("python", 2), ids=" ".join)
def test_a_script_or_module_of_this_repository_exists(words):
    _, first, *rest = words
    path = ROOT / (rest[0].replace(".", "/") if first == "-m" else first)
    ours = first != "-c" and (ROOT / path.relative_to(ROOT).parts[0]).is_dir()
    assert not ours or path.is_file() or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("given", overrides_of_commands(), ids=" ".join)
def test_overrides_compose(given):
    config = compose(["actor_rollout_ref.rollout.name=vllm", *given], "ppo_trainer")
    assert config.trainer.plugin == "tlt"


def test_settings_named_in_a_sentence_compose():
    """All at once: Hydra names the one that is wrong."""
    override = re.compile(rf"'?\+{{0,2}}(?:{GROUPS})\.[\w.]+=")
    named = {span for page in PAGES for span in spans(page) if override.match(span) and "…" not in span}
    given = sorted({word for span in named for word in shlex.split(span)})
    assert len(given) > 20
    assert compose([*given, "+trainer.plugin=tlt"], "ppo_trainer").trainer.plugin == "tlt"
