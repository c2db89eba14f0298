"""`verl-tlt`: one command per module, each importing what it needs only when it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import verl_tlt
from verl_tlt.errors import TLTError, needs, printable

try:
    import typer
    from typer.core import TyperGroup

    from verl_tlt.commands.advise.options import AdviseOptions
    from verl_tlt.commands.console import make_console
    from verl_tlt.commands.warmup.options import LEAST, EvaluateOptions, WarmupOptions, finite, takes_options
    from verl_tlt.files.ownership import check_writable
except ModuleNotFoundError as error:
    raise SystemExit(needs(error)) from None


class Commands(TyperGroup):
    """All commands; what a user can put right ends one as a sentence, not as a traceback, and with exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; `ctx` is click's, which newer releases of typer contain."""
        try:
            return super().invoke(ctx)
        except (TLTError, OSError) as error:
            typer.secho(printable(str(error)), fg="red", err=True)
        raise typer.Exit(1)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line, too: newer releases of typer need pydantic for it."""
        try:
            return super().main(*args, **kwargs)
        except ModuleNotFoundError as error:
            raise SystemExit(needs(error)) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False,
    help="Speculative rollout for verl, trained in idle time.",
)  # fmt: skip
RunScript = Annotated[
    bool, typer.Option("--run-script", help="Run a script that cannot be read, with a stand-in for every program.")
]
ConfigName = Annotated[str, typer.Option(help="verl's top-level config.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"verl-tlt {verl_tlt.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which release this is.")
    ] = False,
) -> None:
    """Speculative rollout for verl, with a drafter that is trained in idle time."""


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Your recipe: the overrides given to verl.trainer.main_ppo, or a script that starts it and what is "
            "given to that; nothing: packages only."
        ),
    ] = None,
    config_name: ConfigName = "ppo_trainer",
    symbols: Annotated[bool, typer.Option("--symbols", help="List everything verl-tlt relies on.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also start the recipe's engine here and measure; takes minutes.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="With --gpu: on this machine's CPU.")] = False,
    run_script: RunScript = False,
) -> None:
    """Say whether TLT can run here: packages and their insides, and a recipe. Exits 0 if so, 1 if not, 3 if perhaps."""
    from verl_tlt.commands.doctor.command import conclude, diagnose, findings_table, measure_engine, symbol_table
    from verl_tlt.commands.script.run import read_arguments

    recipe = read_arguments(overrides or [], config_name, run_script)
    findings = diagnose(recipe)
    if gpu and not any(finding.level == "refuse" for finding in findings):
        findings += measure_engine(recipe, cpu)
    make_console().print(findings_table(findings))
    if symbols:
        make_console().print(symbol_table())
    answer, status = conclude(findings, recipe)
    typer.echo(printable(answer))
    raise typer.Exit(status)


@app.command()
def calibrate(
    overrides: Annotated[list[str], typer.Argument(help="Your recipe: its overrides, or its script.")],
    config_name: ConfigName = "ppo_trainer",
    out: Annotated[
        Path | None, typer.Option(help="Where the table is kept; not given: where runs look for it.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, callback=finite, help="How long to measure, the engine's start apart.")
    ] = 60.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="On this machine's CPU, even where there is a GPU.")] = False,
    run_script: RunScript = False,
) -> None:
    """Measure what an engine step costs here by batch and draft length, and keep the table for later runs."""
    from verl_tlt.commands.doctor.command import calibrate as run
    from verl_tlt.commands.doctor.command import cost_table
    from verl_tlt.commands.script.run import read_arguments

    path, costs = run(read_arguments(overrides, config_name, run_script), out, seconds, cpu)
    make_console().print(cost_table(costs))
    typer.echo(printable(f"Kept in {path}"))


@app.command()
def switch(
    trace_dir: Annotated[Path, typer.Argument(help="Trace directory of a running run (tlt.trace.dir).")],
    speculation: Annotated[str | None, typer.Option(help="on or off: drafting, in every engine.")] = None,
    spot: Annotated[str | None, typer.Option(help="on or off: training the drafter in idle time.")] = None,
) -> None:
    """Stop or resume TLT in a run that goes on, from its next rollout; without options, say what is on."""
    from verl_tlt.trainer.runtime_switch import find_run, read_switch, write_switch

    states = {"on": True, "off": False, None: None}
    if not {speculation, spot} <= states.keys():
        raise typer.BadParameter("a switch is on or off")
    if speculation or spot:
        now = write_switch(trace_dir, speculation=states[speculation], spot=states[spot])
    else:
        now = read_switch(find_run(trace_dir))
    typer.echo(f"speculation {'on' if now.speculation else 'off'}, spot training {'on' if now.spot else 'off'}")


@app.command()
def report(
    trace_dir: Annotated[Path, typer.Argument(help="Trace directory of a run (tlt.trace.dir).")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and picture; the trace's parent if not given.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Also a timeline as a Chrome trace, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
) -> None:
    """Write the HTML page and the picture of a traced run."""
    from verl_tlt.commands.report.command import report as run

    run(trace_dir, out, perfetto)


@app.command()
@takes_options(AdviseOptions)
def advise(options: AdviseOptions) -> None:
    """Say whether TLT would pay, by how much, and which number decides; from a recipe, better with a run of it."""
    _need("advise", "verl")
    from verl_tlt.commands.advise.command import advise as run

    run(options, make_console())


@app.command()
def compare(
    overrides: Annotated[list[str], typer.Argument(help="Your recipe: its overrides, or its script.")],
    config_name: ConfigName = "ppo_trainer",
    arms: Annotated[
        str, typer.Option(help="Compared with stock verl: tlt, tlt-no-spot, vllm-K, vllm-K-lost; by commas.")
    ] = "tlt",
    rounds: Annotated[int, typer.Option(min=0, help="Turns of each arm; 0: report what was measured.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="RL steps of a turn, of which the first does not count.")] = 6,
    out: Annotated[
        Path, typer.Option(help="Folder of jobs, rows, picture and page; one with turns in it is gone on with.")
    ] = Path("compare-out"),
    drafter: Annotated[
        str | None, typer.Option(help="What TLT starts from and vLLM drafts with; tlt.drafter.path if not given.")
    ] = None,
    stall_minutes: Annotated[
        float, typer.Option(min=LEAST, callback=finite, help="A job that logs nothing for so long is ended.")
    ] = 60.0,
    run_script: RunScript = False,
) -> None:
    """Run the recipe with stock verl and with TLT in turns, and say which was faster. It goes on after a kill."""
    _need("compare", "verl", "vllm", "psutil")
    from verl_tlt.commands.compare.command import CompareOptions
    from verl_tlt.commands.compare.command import compare as run
    from verl_tlt.commands.script.run import read_arguments

    options = CompareOptions(
        arms=[name.strip() for name in arms.split(",") if name.strip()],
        rounds=rounds, steps=steps, out=out, drafter=drafter, stall_s=60.0 * stall_minutes,
    )  # fmt: skip
    run(read_arguments(overrides, config_name, run_script), options, make_console())


@app.command()
@takes_options(WarmupOptions)
def warmup(options: WarmupOptions) -> None:
    """Make a drafter for a policy from its own responses to prompts. The same command goes on after a kill."""
    _need("warmup", "torch", "transformers", "verl", "vllm")
    from verl_tlt.commands.warmup.command import warmup as run

    run(options, make_console())


@app.command()
@takes_options(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Accept length of a drafter: predicted from text, and counted by stock vLLM. Exits 1 if they disagree by 5 %."""
    _need("evaluate", "torch", "transformers", "verl", "vllm")
    from verl_tlt.commands.warmup.evaluate import evaluate as run
    from verl_tlt.commands.warmup.evaluate import report as show

    console = make_console()
    verdict = run(options, console)
    show(verdict, console)
    raise typer.Exit(0 if verdict.agrees else 1)


@app.command()
def convert(
    drafter: Annotated[Path, typer.Argument(help="A drafter in SafeAILab's, SpecForge's or speculators' layout.")],
    model: Annotated[Path, typer.Option(help="The policy's Hugging Face directory, or its name on the hub.")],
    out: Annotated[Path, typer.Option(help="Where the converted drafter goes.")],
) -> None:
    """Write an existing EAGLE-3 drafter as vLLM serves it, or say what is wrong with it."""
    _need("convert", "torch", "transformers")
    from verl_tlt.drafter import DrafterError, load_drafter, provenance, save_drafter

    if out.exists():
        raise DrafterError(f"--out {out} exists; give another name, or remove it.")
    check_writable(out.parent, "the directory of --out")
    loaded = load_drafter(drafter, model)
    facts = provenance(drafter) or {"policy": str(model), "converted from": str(drafter)}
    save_drafter(loaded, out, facts, policy=model)
    typer.echo(printable(f"Wrote {out}."))


@app.command()
def write_back(
    head: Annotated[Path, typer.Argument(help="An MTP head that verl-tlt saved, or a model that has one.")],
    policy: Annotated[Path, typer.Argument(help="The policy's Hugging Face directory, which is changed.")],
) -> None:
    """Put an MTP head into a policy's directory, so that `vllm serve` drafts with it by the method mtp."""
    _need("write-back", "torch")
    from verl_tlt.drafter import write_back as run

    typer.echo(printable(f"Wrote {run(head, policy)}."))


def _need(command: str, *packages: str) -> None:
    """End in a sentence where a package is missing that only some commands need."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        typer.secho(f"verl-tlt {command} needs {' and '.join(missing)}, not installed here.", fg="red", err=True)
        raise typer.Exit(1)
