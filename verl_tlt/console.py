"""Where commands print."""

from __future__ import annotations

from rich.console import Console

LOG_WIDTH = 150
"""Columns where there is no terminal to ask."""


def make_console() -> Console:
    """A console that does not squeeze tables into 80 columns when its output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)
