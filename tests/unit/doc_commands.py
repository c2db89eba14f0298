"""Every command that a page shows, as words: fenced shell blocks, and code spans that begin with a command.

`<your recipe>` and the like become one word, `PLACEHOLDER`; what is set in front of a command (`DATA=/data ...`) is
left out.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PLACEHOLDER = "PLACEHOLDER"
PROGRAMS = ("verl-tlt ", "make ", "python ")
"""A code span that begins with one of these is a command."""


@dataclass(frozen=True)
class Command:
    """One command line."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands() -> list[Command]:
    """All of them, in the order of the pages."""
    return [command for page in PAGES for command in _of_page(page)]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language, indented ones too."""
    fenced = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in fenced]


def overrides() -> list[str]:
    """Settings of a recipe that a code span gives by their full name, each once, as the shell hands them on."""
    groups = "tlt|trainer|actor_rollout_ref|algorithm|data|reward|ray_kwargs"
    found = {
        line
        for page in PAGES
        for line in _spans(page)
        if re.match(rf"'?\+{{0,2}}(?:{groups})\.[\w.]+=", line) and "…" not in line
    }
    return sorted({word for line in found for word in shlex.split(line)})


def _of_page(page: Path) -> Iterator[Command]:
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield _command(page.name, line)
    for line in _spans(page):
        if re.match(r"[A-Z_]+=\S* [a-z]", line) or line.startswith(PROGRAMS):
            yield _command(page.name, line)


def _spans(page: Path) -> list[str]:
    """The code spans of a page, line ends as spaces."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def _command(page: str, line: str) -> Command:
    words = shlex.split(re.sub(r"<[a-z][^>]*>", PLACEHOLDER, line), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    program = words[0].removeprefix(".venv/bin/") if words else ""
    return Command(page, (program, *(word for word in words[1:] if word != "...")))
