"""A recipe as the commands are given it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.script.reader import read_script
from verl_tlt.commands.script.run import run_script
from verl_tlt.upstream.versions import look_first_in


def read_arguments(arguments: Sequence[str], config_name: str, run: bool = False) -> Recipe:
    """Overrides, or a script and what is given to that; `run` runs the script. verl is found as the recipe finds it."""
    first = arguments[0] if arguments else ""
    if ("=" in first and not os.path.isfile(first)) or not (first.endswith(".sh") or os.path.isfile(first)):
        recipe = Recipe(tuple(arguments), config_name)
    else:
        recipe = run_script(first, arguments[1:]) if run else read_script(first, arguments[1:])
    folders = recipe.environment.get("PYTHONPATH", "").split(os.pathsep)
    look_first_in([recipe.directory or os.getcwd(), *folders])
    return recipe
