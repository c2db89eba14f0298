"""`verl-tlt`: one command per module, each importing what it needs only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Speculative rollout for verl, trained in idle time."
)


@app.callback()
def main() -> None:
    """Speculative rollout for verl, with a drafter that is trained in idle time."""


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="The overrides of your recipe, as given to verl.trainer.main_ppo; none: packages only."),
    ] = None,
    config_name: Annotated[str, typer.Option(help="verl's top-level config.")] = "ppo_trainer",
    symbols: Annotated[bool, typer.Option("--symbols", help="List everything verl-tlt relies on.")] = False,
) -> None:
    """Say whether TLT can run here: packages and their insides, and with a recipe's overrides that recipe too."""
    from rich.console import Console

    from verl_tlt.diagnose import diagnose, symbol_table, table

    findings = diagnose(overrides or [], config_name)
    Console().print(table(findings))
    if symbols:
        Console().print(symbol_table())
    raise typer.Exit(1 if any(finding.level == "refuse" for finding in findings) else 0)


@app.command()
def demo(
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run stock verl, and TLT with the trained drafter, on the same seed.")
    ] = False,
    steps: Annotated[int, typer.Option(help="GRPO steps of each run.")] = 10,
    out: Annotated[Path, typer.Option(help="Where runs, summary, picture and report go.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
) -> None:
    """Run GRPO with TLT on a toy task, on this machine's CPU, and show what it did."""
    from verl_tlt.demo.command import demo as run

    raise typer.Exit(run(compare=compare, steps=steps, out=out, seed=seed))


@app.command()
def switch(
    trace_dir: Annotated[Path, typer.Argument(help="Trace directory of a running run (tlt.trace.dir).")],
    speculation: Annotated[str | None, typer.Option(help="on or off: drafting, in every engine.")] = None,
    spot: Annotated[str | None, typer.Option(help="on or off: training the drafter in idle time.")] = None,
) -> None:
    """Stop or resume TLT in a run that goes on, from its next rollout; without options, say what is on."""
    from verl_tlt.trainer.live import SwitchError, read_switch, write_switch

    states = {"on": True, "off": False, None: None}
    if not {speculation, spot} <= states.keys():
        raise typer.BadParameter("a switch is on or off")
    try:
        changed = speculation or spot
        now = write_switch(trace_dir, speculation=states[speculation], spot=states[spot]) if changed else None
        now = now or read_switch(trace_dir)
    except SwitchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"speculation {'on' if now.speculation else 'off'}, spot training {'on' if now.spot else 'off'}")


@app.command()
def report(
    trace_dir: Annotated[Path, typer.Argument(help="Trace directory of a run (tlt.trace.dir).")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and picture; the trace's parent if not given.")
    ] = None,
) -> None:
    """Write the HTML page and the picture of a traced run."""
    from verl_tlt.trace.command import report as run

    raise typer.Exit(run(trace_dir, out))
