"""`verl-tlt advise`: reads a recipe and a run's metrics, simulates, judges, and prints the numbers that decide."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from verl_tlt.checks.recipe import ROLLOUT, compose, read_mapping, read_settings
from verl_tlt.commands.advise import hardware
from verl_tlt.commands.advise.judge import Numbers, Verdict, judge, never_trained
from verl_tlt.commands.advise.run_metrics import check_same, read_metrics
from verl_tlt.commands.advise.scenario import SETTINGS, Scenario, estimate
from verl_tlt.commands.advise.simulation import SMALL_BATCH
from verl_tlt.commands.console import say
from verl_tlt.commands.options import AdviseOptions
from verl_tlt.commands.script.run import read_arguments
from verl_tlt.errors import TLTError
from verl_tlt.server.engine_arguments import engine_lengths, graph_mode

DEFAULT_GPU = "H100"


def advise(options: AdviseOptions, console: Console) -> Verdict:
    """Print the advice, and return the answer; raises `TLTError` as `read_scenario` and `estimate` do."""
    scenario, assumed = read_scenario(options)
    numbers = estimate(scenario)
    verdict = judge(numbers)
    style = {"no": "bold red", "it depends": "bold yellow"}.get(verdict.answer, "bold green")
    say(console, f"Does it pay? {verdict.answer}: {verdict.because}", style)
    say(console, "What to do:", "bold")
    for sentence in suggestions(scenario, numbers):
        say(console, f"  {sentence}")
    table = Table("", "", "from", box=box.SIMPLE_HEAD)
    for row in _rows(scenario, numbers):
        table.add_row(*row)
    console.print(table)
    if scenario.metrics is not None:
        say(console, f"Run: {scenario.metrics.source}, {scenario.metrics.steps} steps")
    say(console, "Assumed:", "bold")
    for what, why in {**assumed, **numbers.assumed}.items():
        say(console, f"  {what}: {why}")
    return verdict


def read_scenario(given: AdviseOptions) -> tuple[Scenario, dict[str, str]]:
    """The scenario that recipe, run and user describe; and what had to be assumed, value and why."""
    if given.response_length is not None and given.metrics:
        raise TLTError(f"--response-length is read from the run in {given.metrics}: leave it out.")
    recipe = read_arguments(given.recipe, given.config_name, given.run_script)
    config = compose(recipe.overrides, recipe.config)
    assumed: dict[str, str] = {}
    if given.gpu is None:
        assumed["GPU"] = f"{DEFAULT_GPU}; --gpu names another ({', '.join(sorted(hardware.GPUS))})"
    elif given.gpu.upper() not in hardware.GPUS:
        raise TLTError(f"--gpu {given.gpu} is not one of {', '.join(sorted(hardware.GPUS))}.")
    with recipe.place():
        settings, work = read_settings(config), hardware.read_workload(config)
        if given.parameters is None:
            shape, source = hardware.find_shape(work.policy)
            assumed["policy's shape"] = f"{shape.parameters / 1e9:.1f}B parameters, from {source}"
        else:
            shape = hardware.shape_of_size(given.parameters * 1e9)
    if settings.speculation.source == "ngram":
        raise TLTError("tlt.speculation.source=ngram has no drafter to advise on: verl-tlt compare measures n-grams.")
    arms = engine_lengths(settings, graph_mode(read_mapping(config, f"{ROLLOUT}.engine_kwargs.vllm"), work.eager))
    if len(arms) < 2:
        raise TLTError("This recipe never drafts, so there is nothing to advise on.")
    metrics = read_metrics(given.metrics) if given.metrics else None
    if metrics is not None:
        check_same(metrics, work)
        assumed["the run's policy"] = f"that of the recipe, which {metrics.source} does not name"
    scenario = Scenario(
        work,
        shape,
        hardware.GPUS[(given.gpu or DEFAULT_GPU).upper()],
        arms,
        spot=settings.spot.enable,
        has_drafter=settings.drafter.path is not None or settings.drafter.method == "mtp",
        metrics=metrics,
        acceptance=given.acceptance_by_position(),
        response=given.response_length,
    )
    return scenario, assumed


def suggestions(scenario: Scenario, n: Numbers) -> list[str]:
    sentences = []
    if not n.has_drafter:
        sentences.append("verl-tlt warmup, then tlt.drafter.path: a random head drafts nothing in its first steps.")
    if scenario.spot and (why := never_trained(n)):
        sentences.append(f"Set tlt.spot.enable=false, or change what keeps sessions from beginning: {why}.")
    if n.accept["likely"] > 2.3 and scenario.arms[-1] <= 3 and n.tail_share > 0.3:
        sentences.append("Try tlt.speculation.max_draft_length=7: small batches bear longer drafts.")
    return [*sentences, "verl-tlt compare measures it: stock verl and TLT in turns."]


def _rows(scenario: Scenario, n: Numbers) -> list[tuple[str, str, str]]:
    """(what, figure, where it is from) of each line of the table."""
    work, measured = scenario.work, "run" if scenario.metrics else "simulated"
    fleet = f"{work.replicas} replicas, each of {work.tensor_parallel} GPUs; {work.gpus} GPUs train"
    share = f"{n.share:.0%} ({n.gen_s:.1f} of {n.gen_s + n.rest_s:.1f} s)"
    rows = [
        ("step, times as fast as stock", _range({name: n.step(name) for name in SETTINGS}), "Amdahl with the next two"),
        ("rollout, times as fast as stock", _range(n.rollout), "simulated"),
        ("rollout's share of a step", share, measured),
        ("accept length at K of up to 3", _range(n.accept), "given" if scenario.acceptance else "assumed"),
        ("the run", f"{work.requests} responses on {fleet}", "recipe"),
        ("KV cache of an engine", f"{n.kv_tokens:,} tokens", "data sheet"),
        ("a step with a rollout of 0 s (Amdahl)", f"{n.bound:.2f}x", "1 / (1 - share)"),
        (f"tail: engine time at batches below {SMALL_BATCH}", f"{n.tail_share:.0%}", "simulated"),
        ("bubble, mean of the replicas", f"{n.bubble_s:.1f} s; a session needs {n.bubble_needed_s:.1f} s", "simulated"),
    ]  # fmt: skip
    if n.tool_share:
        rows.append(("waiting for tools", f"{n.tool_share:.0%} of a response's time", measured))
    for batch, lengths in n.break_even.items():
        cells = ", ".join(f"K={k} {tau:.2f}" for k, tau in lengths.items())
        rows.append((f"break-even accept length, batch {batch}", cells, f"step costs at {n.context} tokens"))
    return rows


def _range(by_setting: Mapping[str, float]) -> str:
    return f"{by_setting['likely']:.2f} ({by_setting['low']:.2f} to {by_setting['high']:.2f})"
