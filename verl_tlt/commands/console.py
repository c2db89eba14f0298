"""The terminal that commands print to, and the end of a log in a message."""

import os
import re
from pathlib import Path

from rich.console import Console

from verl_tlt.errors import printable

LOG_WIDTH = 150
"""Columns of the output where neither a terminal nor `COLUMNS` says how many there are."""
LAST_LINES, LONGEST_LINE = 15, 300
"""Lines of a log in a message, and characters of a line."""


def make_console() -> Console:
    """A console that does not squeeze tables into 80 columns when its output goes to a file."""
    console = Console(emoji=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=LOG_WIDTH, emoji=False)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text without markup and without wrapping its lines, so that paths can be copied."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def lines_of(log: Path) -> list[str]:
    """The lines of a log, without the terminal's colours and without empty ones."""
    return [line for line in without_colours(log.read_text(errors="replace")).splitlines() if line.strip()]


def last_lines(log: Path) -> str:
    """The end of a log, for a message."""
    return "\n".join(f"    {line[:LONGEST_LINE]}" for line in lines_of(log)[-LAST_LINES:])
