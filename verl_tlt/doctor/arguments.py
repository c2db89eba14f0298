"""A recipe as the commands are given it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from verl_tlt.doctor.recipe import Recipe
from verl_tlt.doctor.run_script import run_script
from verl_tlt.doctor.script import read_script


def read_arguments(arguments: Sequence[str], config_name: str, run: bool = False) -> Recipe:
    """A recipe as a command is given it: overrides, or a script and what is given to that; `run` runs the script."""
    first = arguments[0] if arguments else ""
    if ("=" in first and not os.path.isfile(first)) or not (first.endswith(".sh") or os.path.isfile(first)):
        return Recipe(tuple(arguments), config_name)
    return run_script(first, arguments[1:]) if run else read_script(first, arguments[1:])
