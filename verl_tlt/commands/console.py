"""The terminal that commands print to."""

from __future__ import annotations

import os

from rich.console import Console

LOG_WIDTH = 150
"""Columns where neither a terminal nor `COLUMNS` says how many there are."""


def make_console() -> Console:
    """A console that does not squeeze tables into 80 columns when its output goes to a file."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=LOG_WIDTH)
