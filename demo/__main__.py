"""`python -m demo`, from a clone of the repository: what `make demo` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from demo.command import demo


def main(
    compare: Annotated[
        bool, typer.Option("--compare", help="Then compare stock verl with TLT and the trained drafter, in turns.")
    ] = False,
    steps: Annotated[int, typer.Option(help="GRPO steps of each run.")] = 10,
    out: Annotated[Path, typer.Option(help="Where runs, summary, picture and report go.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
) -> None:
    """Run GRPO with TLT on a toy task, on this machine's CPU, and show what it did."""
    raise typer.Exit(demo(against_stock=compare, steps=steps, out=out, seed=seed))


if __name__ == "__main__":
    typer.run(main)
