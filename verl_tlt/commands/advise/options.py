"""Options of `verl-tlt advise`, and those of every command that takes a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_tlt.errors import TLTError

RecipeWords = Annotated[
    list[str], Argument(help="Your recipe: a script that starts verl, and what follows it; or verl's overrides.")
]
ConfigName = Annotated[str, Option(help="Name of verl's Hydra config.")]
RunScript = Annotated[
    bool, Option("--run-script", help="Run a script that cannot be read otherwise; programs in it are not started.")
]


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    recipe: RecipeWords
    trace: Annotated[Path | None, Option(help="Trace directory of a run with TLT (tlt.trace.dir).")] = None
    metrics: Annotated[Path | None, Option(help="A run's metrics: verl's `file` logger or console log.")] = None
    gpu: Annotated[str | None, Option(help="A100, B200, H100, H20, H200 or L40S; by default H100.")] = None
    parameters: Annotated[float | None, Option(min=1e-3, help="The policy's size, in billions.")] = None
    response_length: Annotated[float | None, Option(min=1, help="Mean response length, in tokens.")] = None
    acceptance: Annotated[
        str | None, Option(help="Conditional acceptance at draft positions 1, 2, 3: 0.8,0.75,0.7.")
    ] = None
    config_name: ConfigName = "ppo_trainer"
    run_script: RunScript = False

    def acceptance_by_position(self) -> tuple[float, ...]:
        """`--acceptance` as numbers, empty where it is not given; a `TLTError` where one is no number in 0..1."""
        parts = [part.strip() for part in (self.acceptance or "").split(",") if part.strip()]
        if not all(re.fullmatch(r"0?\.\d+|[01](\.0*)?", part) for part in parts):
            wanted = "numbers in 0..1 with commas between, one for each position"
            raise TLTError(f"--acceptance takes {wanted}, not {self.acceptance!r}.")
        return tuple(float(part) for part in parts)
