"""`python -m demo`, from a clone of the repository: what `make demo` runs."""

from pathlib import Path
from typing import Annotated

import typer

from demo.command import demo


def main(
    compare: Annotated[
        bool, typer.Option("--compare", help="Then compare stock verl with TLT and the trained drafter, in turns.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Begin with a random drafter, which idle time alone trains.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="GRPO steps: 6, or 10 from scratch.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs, summary and report go.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
) -> None:
    """Warm up a drafter once, run GRPO with TLT on a toy task, on this machine's CPU, and show what it did."""
    raise typer.Exit(demo(against_stock=compare, steps=steps, out=out, seed=seed, from_scratch=from_scratch))


if __name__ == "__main__":
    typer.run(main)
