"""Options of `verl-tlt advise`: what the user says about a run, from which the command line is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_tlt.errors import TLTError


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    recipe: Annotated[list[str], Argument(help="Your recipe: its overrides, or its script.")]
    trace: Annotated[Path | None, Option(help="Trace directory of a run of it (tlt.trace.dir).")] = None
    metrics: Annotated[
        Path | None, Option(help="Metrics of a run of it, stock or not: verl's `file` logger or console log.")
    ] = None
    gpu: Annotated[str | None, Option(help="A100, B200, H100, H20, H200 or L40S; H100 if not given.")] = None
    parameters: Annotated[float | None, Option(min=1e-3, help="The policy's size, in billions.")] = None
    response_length: Annotated[float | None, Option(min=1, help="Mean response, in tokens.")] = None
    reward_seconds: Annotated[float, Option(min=0, help="What reward adds to a step.")] = 0.0
    acceptance: Annotated[
        str | None, Option(help="Of your drafter, by position: 0.8,0.75,0.7 as verl-tlt evaluate says it.")
    ] = None
    config_name: Annotated[str, Option(help="verl's top-level config.")] = "ppo_trainer"
    run_script: Annotated[
        bool, Option("--run-script", help="Run a script that cannot be read, with a stand-in for every program.")
    ] = False

    def acceptance_by_position(self) -> tuple[float, ...]:
        """`--acceptance` as numbers, empty where it is not given; a `TLTError` where one is no number in 0..1."""
        parts = [part.strip() for part in (self.acceptance or "").split(",") if part.strip()]
        if not all(re.fullmatch(r"0?\.\d+|[01](\.0*)?", part) for part in parts):
            wanted = "numbers in 0..1 with commas between, one for each position"
            raise TLTError(f"--acceptance takes {wanted}, not {self.acceptance!r}.")
        return tuple(float(part) for part in parts)
