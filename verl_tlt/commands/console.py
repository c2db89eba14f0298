"""The terminal that commands print to."""

import os

from rich.console import Console

from verl_tlt.errors import printable

LOG_WIDTH = 150
"""Columns of the output where neither a terminal nor `COLUMNS` says how many there are."""


def make_console() -> Console:
    """A console that does not squeeze tables into 80 columns when its output goes to a file."""
    console = Console(emoji=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=LOG_WIDTH, emoji=False)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text without markup and without wrapping its lines, so that paths can be copied."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)
