"""`verl-tlt`: one command per module, each importing what it needs only when it runs."""

from __future__ import annotations

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
) -> None:
    """Say whether TLT can run here: packages, and with a recipe's overrides that recipe too."""
    from rich.console import Console

    from verl_tlt.diagnose import diagnose, table

    findings = diagnose(overrides or [], config_name)
    Console().print(table(findings))
    raise typer.Exit(1 if any(finding.level == "refuse" for finding in findings) else 0)
