"""`verl-tlt`: one command per module, each importing what it needs only when it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import verl_tlt

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Speculative rollout for verl, trained in idle time."
)


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
    config_name: Annotated[str, typer.Option(help="verl's top-level config.")] = "ppo_trainer",
    symbols: Annotated[bool, typer.Option("--symbols", help="List everything verl-tlt relies on.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also start the recipe's engine here and measure; takes minutes.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="With --gpu: on this machine's CPU.")] = False,
) -> None:
    """Say whether TLT can run here: packages and their insides, and with a recipe's overrides that recipe too."""
    from rich.console import Console

    from verl_tlt.doctor.command import diagnose, findings_table, measure_engine, symbol_table
    from verl_tlt.doctor.recipe import read_arguments

    with _refusals():
        recipe = read_arguments(overrides or [], config_name)
    findings = diagnose(recipe)
    if gpu and not any(finding.level == "refuse" for finding in findings):
        findings += measure_engine(recipe, cpu)
    Console().print(findings_table(findings))
    if symbols:
        Console().print(symbol_table())
    raise typer.Exit(1 if any(finding.level == "refuse" for finding in findings) else 0)


@app.command()
def calibrate(
    overrides: Annotated[list[str], typer.Argument(help="Your recipe: its overrides, or its script.")],
    config_name: Annotated[str, typer.Option(help="verl's top-level config.")] = "ppo_trainer",
    out: Annotated[
        Path | None, typer.Option(help="Where the table is kept; not given: where runs look for it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, the engine's start apart.")] = 60.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="On this machine's CPU, even where there is a GPU.")] = False,
) -> None:
    """Measure what an engine step costs here by batch and draft length, and keep the table for later runs."""
    from rich.console import Console

    from verl_tlt.doctor.command import calibrate as run
    from verl_tlt.doctor.command import cost_table
    from verl_tlt.doctor.recipe import read_arguments

    with _refusals():
        path, costs = run(read_arguments(overrides, config_name), out, seconds, cpu)
    Console().print(cost_table(costs))
    typer.echo(f"Kept in {path}")


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
    with _refusals():
        changed = speculation or spot
        now = write_switch(trace_dir, speculation=states[speculation], spot=states[spot]) if changed else None
        now = now or read_switch(find_run(trace_dir))
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
    from verl_tlt.report.command import report as run

    raise typer.Exit(run(trace_dir, out, perfetto))


@app.command()
def advise(
    recipe: Annotated[list[str], typer.Argument(help="Your recipe: its overrides, or its script.")],
    trace: Annotated[Path | None, typer.Option(help="Trace directory of a run of it (tlt.trace.dir).")] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Metrics of a run of it, stock or not: verl's `file` logger or console log.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="A100, B200, H100, H20, H200 or L40S; H100 if not given.")] = None,
    parameters: Annotated[float | None, typer.Option(help="The policy's size, in billions.")] = None,
    response_length: Annotated[float | None, typer.Option(help="Mean response, in tokens.")] = None,
    reward_seconds: Annotated[float, typer.Option(min=0, help="What reward adds to a step.")] = 0.0,
    acceptance: Annotated[
        str | None, typer.Option(help="Of your drafter, by position: 0.8,0.75,0.7 as verl-tlt evaluate says it.")
    ] = None,
    config_name: Annotated[str, typer.Option(help="verl's top-level config.")] = "ppo_trainer",
    seed: Annotated[int, typer.Option(min=0, help="Seeds the simulation.")] = 0,
) -> None:
    """Say whether TLT would pay, by how much, and which number decides; from a recipe, better with a run of it."""
    _need("advise", "verl")
    from verl_tlt.advise.command import Given, parse_acceptance
    from verl_tlt.advise.command import advise as run
    from verl_tlt.console import make_console

    with _refusals():
        given = Given(
            gpu, parameters, response_length, reward_seconds, parse_acceptance(acceptance), trace, metrics, seed
        )
        run(recipe, config_name, given, make_console())


@app.command()
def warmup(
    model: Annotated[Path, typer.Option(help="The policy's Hugging Face directory, or its name on the hub.")],
    prompts: Annotated[Path, typer.Option(help="Prompts: verl's .parquet, .jsonl with a field `prompt`, or .txt.")],
    out: Annotated[Path, typer.Option(help="Where the drafter goes; work in progress is in OUT.warmup beside it.")],
    drafter: Annotated[
        Path | None, typer.Option(help="A drafter to go on from, any EAGLE-3 layout; a directory or a name on the hub.")
    ] = None,
    objective: Annotated[str, typer.Option(help="eagle, hass or eagle3: 1, 3 or 7 draft positions unrolled.")] = "hass",
    loss: Annotated[str, typer.Option(help="Loss of speculators: kl_div, ce, tv, nla, lk_hybrid.")] = "kl_div",
    aux_layers: Annotated[str | None, typer.Option(help="Policy layers to read, e.g. 2,18,33.")] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the drafter's MLP; the policy's if not given.")
    ] = None,
    draft_vocab: Annotated[int | None, typer.Option(help="Only the most frequent tokens can be drafted.")] = None,
    samples: Annotated[int, typer.Option(help="Responses per prompt.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts.")] = None,
    response_length: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="Of the rollout this drafter is for.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Of the rollout.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of the rollout; 0: off.")] = 0,
    epochs: Annotated[float, typer.Option(help="Budget: passes over the responses.")] = 4.0,
    max_steps: Annotated[float, typer.Option(help="Budget: optimizer steps.")] = float("inf"),
    max_tokens: Annotated[float, typer.Option(help="Budget: response tokens learned from.")] = float("inf"),
    max_minutes: Annotated[float, typer.Option(help="Budget: minutes of training.")] = float("inf"),
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a packed batch.")] = 2048,
    learning_rate: Annotated[float, typer.Option(help="AdamW's, at its peak.")] = 1e-3,
    draft_length: Annotated[int, typer.Option(help="Draft length its accept length is reported for.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs vLLM generates on.")] = 1,
    cache_gb: Annotated[
        float, typer.Option(min=0, help="Host memory for hidden states; the rest is computed again.")
    ] = 8.0,
    seed: Annotated[int, typer.Option(min=0, help="Seeds head, sampling and order.")] = 0,
) -> None:
    """Make a drafter for a policy from its own responses to prompts. The same command goes on after a kill."""
    _need("warmup", "torch", "transformers", "vllm")
    from rich.console import Console

    from verl_tlt.warmup.command import Warmup, parse_layers
    from verl_tlt.warmup.command import warmup as run
    from verl_tlt.warmup.engine import SamplingSettings
    from verl_tlt.warmup.train import Budget

    with _refusals():
        settings = Warmup(
            model=model,
            prompts=prompts,
            out=out,
            start=drafter,
            aux_layers=parse_layers(aux_layers),
            intermediate_size=intermediate_size,
            objective=objective,
            loss=loss,
            draft_vocab=draft_vocab,
            samples=samples,
            limit=limit,
            sampling=SamplingSettings(temperature, top_p, top_k, response_length, seed),
            budget=Budget(epochs, max_steps, max_tokens, max_minutes),
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            draft_length=draft_length,
            device=device,
            tensor_parallel=tensor_parallel,
            cache_gb=cache_gb,
            seed=seed,
        )
        run(settings, Console())


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Argument(help="The drafter's directory, or its name on the hub.")],
    model: Annotated[Path, typer.Option(help="The policy's Hugging Face directory, or its name on the hub.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts; if not given those of its warm-up, held-out ones only.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 64,
    response_length: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="Of the rollout.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Of the rollout.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of the rollout; 0: off.")] = 0,
    draft_length: Annotated[int, typer.Option(min=1, max=16, help="Tokens per draft.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs vLLM serves on.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seeds sampling.")] = 0,
) -> None:
    """Accept length of a drafter: predicted from text, and counted by stock vLLM. Exits 1 if they disagree by 5 %."""
    _need("evaluate", "torch", "transformers", "vllm")
    from rich.console import Console

    from verl_tlt.warmup.engine import SamplingSettings, find_device
    from verl_tlt.warmup.evaluate import evaluate as run
    from verl_tlt.warmup.evaluate import report as show

    console = Console()
    with _refusals():
        verdict = run(
            drafter,
            model,
            prompts,
            SamplingSettings(temperature, top_p, top_k, response_length, seed),
            device=find_device(device),
            draft_length=draft_length,
            limit=limit,
            tensor_parallel=tensor_parallel,
            console=console,
        )
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

    with _refusals():
        if out.exists():
            raise DrafterError(f"--out {out} exists; give another name, or remove it.")
        facts = provenance(drafter) or {"policy": str(model), "converted from": str(drafter)}
        save_drafter(load_drafter(drafter, model), out, facts, policy=model)
        typer.echo(f"Wrote {out}.")


def _need(command: str, *packages: str) -> None:
    """End in a sentence where a package is missing that only some commands need."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        typer.secho(f"verl-tlt {command} needs {' and '.join(missing)}, not installed here.", fg="red", err=True)
        raise typer.Exit(1)


@contextmanager
def _refusals() -> Iterator[None]:
    """Print what a user can put right as a sentence, not as a traceback, and exit with 1."""
    from verl_tlt.errors import TLTError

    try:
        yield
    except TLTError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
