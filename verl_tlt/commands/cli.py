"""`verl-tlt`: one command per module, each importing what it needs only when it runs."""

from pathlib import Path
from typing import Annotated, Any

import verl_tlt
from verl_tlt.errors import TLTError, needs, printable

try:
    import typer
    from typer import Argument, Option
    from typer.core import TyperGroup

    from verl_tlt.commands.console import make_console
    from verl_tlt.commands.interrupts import interruptible
    from verl_tlt.commands.options import (
        AdviseOptions,
        CommandAfterDashes,
        CompareOptions,
        DoctorOptions,
        EvaluateOptions,
        WarmupOptions,
        takes_options,
    )
    from verl_tlt.files.disk import check_writable, expanded
    from verl_tlt.upstream.versions import require
except ModuleNotFoundError as error:
    raise SystemExit(needs(error)) from None


class Commands(TyperGroup):
    """All commands; an error that a user can correct is printed as one sentence, not as a traceback; exit status 1."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except ModuleNotFoundError as error:  # also a package by which newer releases of typer read the command line
            raise SystemExit(needs(error)) from None
        except (TLTError, OSError) as error:
            sentence = str(error)
            if isinstance(error, OSError) and error.filename and error.strerror:
                sentence = f"{error.filename}: {error.strerror}."
            typer.secho(printable(sentence), fg="red", err=True)
        raise SystemExit(1)

    @interruptible()
    def invoke(self, ctx: Any) -> Any:
        """Run the command; a signal ends it with exit status 130, as typer has it for Ctrl-C."""
        return super().invoke(ctx)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"verl-tlt {verl_tlt.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Say which release this is.")
    ] = False,
) -> None:
    """Speculative decoding for verl's rollouts, with a drafter that is trained in idle time.

    \b
    Begin with:
      verl-tlt doctor -- bash recipe.sh +trainer.plugin=tlt
      verl-tlt advise metrics.jsonl
    """


@app.command(cls=CommandAfterDashes)
@takes_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Can TLT run here? Checks packages and your recipe.

    A command after -- is run until it starts verl, and ended there. Overrides and --config run nothing.
    Exit status: 0 yes; 1 no; 3: the recipe is fine, but this machine lacks GPUs or files, or the flag is not set.

    \b
    Examples:
      verl-tlt doctor
      verl-tlt doctor -- bash recipe.sh +trainer.plugin=tlt
      verl-tlt doctor --gpu -- python3 -m verl.trainer.main_ppo ... +trainer.plugin=tlt
    """
    from verl_tlt.commands.doctor.command import doctor as run

    raise typer.Exit(run(options, make_console()))


@app.command()
@takes_options(AdviseOptions)
def advise(options: AdviseOptions) -> None:
    """How much could a faster rollout gain? From the metrics of a run.

    \b
    Examples:
      verl-tlt advise metrics.jsonl
      verl-tlt advise wandb_export.csv
      verl-tlt advise metrics.jsonl --drafter drafters/qwen3-8b --costs tlt-doctor.json
    """
    from verl_tlt.commands.advise.command import advise as run

    run(options, make_console())


@app.command(cls=CommandAfterDashes)
@takes_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Is it faster here? Runs stock verl and TLT in turns.

    Interrupted, the same command continues.

    \b
    Example:
      verl-tlt compare --drafter drafters/qwen3-8b --out compare-out -- bash recipe.sh
    """
    from verl_tlt.commands.compare.command import compare as run

    run(options, make_console())


@app.command(cls=CommandAfterDashes)
@takes_options(WarmupOptions)
def warmup(options: WarmupOptions) -> None:
    """Train a drafter before the run, from the policy's responses.

    Interrupted, the same command continues.

    \b
    Examples:
      verl-tlt warmup --model Qwen/Qwen3-8B --prompts train.parquet --out drafters/qwen3-8b
      verl-tlt warmup --out drafters/qwen3-8b --max-minutes 60 -- bash recipe.sh
    """
    from verl_tlt.commands.warmup.command import warmup as run

    run(options, make_console())


@app.command(cls=CommandAfterDashes)
@takes_options(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Measure a drafter's accept length in vLLM.

    Also compares it with the accept length computed without vLLM. Exit status 1: they differ by more than 5 % plus
    chance.

    \b
    Example:
      verl-tlt evaluate drafters/qwen3-8b --model Qwen/Qwen3-8B --prompts test.parquet
    """
    from verl_tlt.commands.warmup.evaluate import evaluate as run
    from verl_tlt.commands.warmup.evaluate import report as show

    console = make_console()
    verdict = run(options, console)
    show(verdict, console)
    raise typer.Exit(0 if verdict.agrees else 1)


@app.command()
def report(
    trace_dir: Annotated[Path, Argument(help="Trace directory of a run (tlt.trace.dir).")],
    out: Annotated[Path | None, Option(help="The page (*.html), or its folder; by default the trace's parent.")] = None,
) -> None:
    """Did it pay in a run? A table and a page of its trace.

    \b
    Example:
      verl-tlt report checkpoints/tlt_trace --out report
    """
    from verl_tlt.commands.report.command import report as run

    run(expanded(trace_dir), None if out is None else expanded(out))


@app.command()
def convert(
    drafter: Annotated[Path, Argument(help="An EAGLE-3 drafter as speculators, SpecForge, EAGLE or ModelOpt save it.")],
    model: Annotated[Path, Option(help="The policy's Hugging Face directory, or its name on the hub.")],
    out: Annotated[Path, Option(help="Where the converted drafter goes.")],
) -> None:
    """Bring an EAGLE-3 drafter into the layout that vLLM serves.

    \b
    Example:
      verl-tlt convert downloaded/eagle3 --model Qwen/Qwen3-8B --out drafters/qwen3-8b
    """
    require("torch", "transformers")
    from verl_tlt.drafter import load_drafter, provenance, save_drafter
    from verl_tlt.drafter.check import place_for

    check_writable(place_for(out, "--out").parent, "the directory of --out")
    loaded = load_drafter(drafter, model)
    facts = provenance(drafter) or {"policy": str(model), "converted from": str(drafter)}
    save_drafter(loaded, out, facts, policy=model)
    typer.echo(printable(f"Wrote {out}."))


@app.command()
def write_back(
    head: Annotated[Path, Argument(help="An MTP head that verl-tlt saved, or a model that has one.")],
    policy: Annotated[Path, Argument(help="The policy's Hugging Face directory, which is changed.")],
) -> None:
    """Put an MTP head into a policy's directory, for vLLM.

    \b
    Example:
      verl-tlt write-back checkpoints/tlt_drafter models/mimo-7b
    """
    require("torch")
    from verl_tlt.drafter import write_back as run

    typer.echo(printable(f"Wrote {run(head, policy)}."))


if __name__ == "__main__":
    app()
