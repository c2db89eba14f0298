"""`verl-tlt doctor` and `calibrate`: what is wrong with a recipe here, and what its engine's steps cost, as tables.

Judging imports neither verl nor torch. Measuring starts the recipe's engine in a process of its own.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from verl_tlt.checks import rules
from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import ROLLOUT, Recipe, compose, devices, number, read_settings, select, trainer_mode
from verl_tlt.config import COSTS_DIR, TLTConfigError
from verl_tlt.errors import TLTError, printable
from verl_tlt.files.disk import check_writable
from verl_tlt.upstream.versions import installed, location

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tlt.speculation.costs.tables import LatencyTable


def diagnose(recipe: Recipe) -> list[Finding]:
    """Findings for this environment, and for a recipe if its overrides are given."""
    findings = examine_recipe(recipe)
    findings += filter(None, map(_place, ("verl", "vllm")))
    if recipe.assumed:
        others = f" and {len(recipe.assumed) - 3} more" if len(recipe.assumed) > 3 else ""
        taken = f"nothing of it was run; it is taken to go on after {', '.join(recipe.assumed[:3])}{others}"
        findings.insert(1, Finding("ok", "script", taken))
    return findings


def _place(package: str) -> Finding | None:
    """The folder that a package is imported from, with a warning where it hides an installed one; None: there is none.

    Python looks in the working directory first, so a clone or a folder of that name hides the installed package.
    """
    if (folder := location(package)) is None:
        return None
    spec = importlib.util.find_spec(package)
    other = next(iter(spec.submodule_search_locations or ()), folder) if spec else folder
    if os.path.realpath(other) == os.path.realpath(folder):
        return Finding("ok", f"{package}'s folder", f"{package} is read in {folder}")
    return Finding("warn", f"{package}'s folder", f"{package} is read in {folder}, which hides that in {other}")


def conclude(findings: Sequence[Finding], recipe: Recipe) -> tuple[str, int]:
    """The doctor's answer in a sentence, and the command's exit status: 0 can run, 1 cannot run, 3 can run if."""
    refused, conditions = ([f.sentence for f in findings if f.level == level] for level in ("refuse", "if"))
    if refused:
        others = f" ({len(refused) - 1} more above)" if len(refused) > 1 else ""
        return f"TLT cannot run here: {refused[0]}{others}", 1
    if conditions:
        return f"TLT can run, if this is put right or holds where it runs: {' '.join(conditions)}", 3
    if not recipe.overrides:
        return "TLT can run with what is installed here; give your recipe to know whether that can, too.", 0
    return "TLT can run here.", 0


def examine_recipe(recipe: Recipe) -> list[Finding]:
    """Findings on the installed releases, and on a recipe if its overrides are given."""
    first = rules.examine_packages()
    if not recipe.overrides or installed("verl") is None:
        return first
    try:
        config = compose(recipe.overrides, recipe.config)
        first.insert(0, rules.switched_on(config))
        environment = {**os.environ, **recipe.environment}
        with recipe.place():
            return [*rules.examine(config, read_settings(config)), *examine_gpus(config, environment)]
    except TLTConfigError as error:
        return [*first, Finding("refuse", "settings", str(error))]


def visible_gpus(environment: Mapping[str, str], root: str = "/") -> int:
    """GPUs that a process with this environment would see; `root` holds `dev` and `sys`."""
    count = nvidia = len(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    for node in glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")):  # AMD's; a CPU is 0
        count += Path(node).read_text().strip() not in ("", "0")
    most = count or float("inf")
    count = count or int(os.path.exists(os.path.join(root, "dev/dxg")))  # WSL's: one or more
    of_amd = () if nvidia else ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    for variable in ("CUDA_VISIBLE_DEVICES", *of_amd):
        if (value := environment.get(variable)) is not None:
            listed = listed_gpus(value, most)
            count = listed if "MIG-" in value else min(count, listed)
    return count


def listed_gpus(value: str, devices: float) -> int:
    """GPUs that a driver with so many devices takes a `*_VISIBLE_DEVICES` variable to list.

    It reads a number, of whose word it ignores the rest, or a UUID. It stops at the first word that is neither, such as
    Slurm's NoDevFiles, or that names no device, and takes none if one is named twice.
    """
    known: list[str] = []
    for word in value.split(","):
        index = re.match(r"\s*(-?\d+)", word)
        if index is not None and not 0 <= int(index[1]) < devices:
            break
        if index is None and not word.strip().startswith(("GPU-", "MIG-")):
            break
        known.append(index[1] if index is not None else word.strip())
    return len(known) if len(set(known)) == len(known) else 0


def examine_gpus(config: DictConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the GPUs that the recipe asks for are seen here; no finding for a recipe that runs on the CPU."""
    device, what = str(select(config, "trainer.device", "cuda")), "GPUs"
    if device == "cpu":
        return []
    if device != "cuda":
        return [Finding("if", what, f"trainer.device={device}: whether there are such devices was not looked at.")]
    nodes = ["trainer", *([ROLLOUT] if trainer_mode(config) == "separate_async" else [])]
    asked, seen = sum(devices(config, node) for node in nodes), visible_gpus(environment)
    if asked <= seen:
        return [Finding("ok", what, f"{seen} GPUs are seen here")]
    names = [f"{node}.{name}" for node in nodes for name in ("nnodes", "n_gpus_per_node")]
    counts = [f"{name}={number(config, name, 1)}" for name in names]
    wanted = f"{' and '.join(counts)} ask for {asked} GPUs"
    return [Finding("if", what, f"{wanted}, and {seen or 'none'} {'is' if seen == 1 else 'are'} seen here.")]


def findings_table(findings: list[Finding]) -> Table:
    rows = Table("", Column("what", overflow="fold"), Column("finding", overflow="fold"), title="verl-tlt doctor")
    style = {"ok": "green", "warn": "yellow", "if": "bold yellow", "refuse": "bold red"}
    for f in findings:
        rows.add_row(Text(f.level, style=style[f.level]), Text(f.what), Text(printable(f.sentence)))
    return rows


def measure_engine(recipe: Recipe, cpu: bool) -> list[Finding]:
    """Findings that only a real engine on this machine can give (`commands.doctor.engine_check`)."""
    from verl_tlt.commands.doctor.engine_check import EngineJob, keep_costs, run_job

    try:
        _needs_gpu(recipe, cpu)
        answer = run_job(EngineJob(recipe, cpu))
    except TLTError as error:
        return [Finding("refuse", "engine", str(error))]
    try:
        kept = Finding("ok", "cost table", f"kept for runs in {keep_costs(answer, costs_directory(recipe))[0]}")
    except TLTConfigError as error:
        kept = Finding("warn", "cost table", str(error))
    return [*answer.findings, kept]


def _needs_gpu(recipe: Recipe, cpu: bool) -> None:
    if not cpu and not visible_gpus({**os.environ, **recipe.environment}):
        raise TLTError("No GPU found; --cpu measures on the CPU.")


def calibrate(recipe: Recipe, out: Path | None, seconds: float, cpu: bool) -> tuple[Path, LatencyTable]:
    """Measure the step costs of a recipe's engine for so many `seconds` and keep them; returns the file and its table.

    `out` is the directory of the table; None: where the recipe's run looks for it. A `TLTError` says that the doctor
    refuses the recipe, or that the engine could not be started or measured.
    """
    from verl_tlt.commands.doctor.engine_check import EngineJob, keep_costs, run_job

    _needs_gpu(recipe, cpu)
    # Missing data is no reason to refuse: nothing is trained.
    refusals = [f.sentence for f in examine_recipe(recipe) if f.level == "refuse" and not f.what.startswith("data.")]
    if refusals:
        raise TLTConfigError("\n".join(refusals))
    directory = out or costs_directory(recipe)
    check_writable(directory, "--out" if out else "tlt.speculation.costs_dir")
    return keep_costs(run_job(EngineJob(recipe, cpu, budget_s=seconds, costs_only=True)), directory)


def costs_directory(recipe: Recipe) -> Path:
    """The directory in which a run of the recipe looks for step costs; the default one where it looks nowhere."""
    directory = read_settings(compose(recipe.overrides, recipe.config)).speculation.costs_dir or COSTS_DIR
    return Path("" if directory.startswith("~") else recipe.directory or "", directory)


def cost_table(costs: LatencyTable) -> Table:
    """Milliseconds per engine step, a column per batch."""
    rows_of = {k: dict(costs.by_batch(k)) for k in costs.lengths()}
    batches = sorted({batch for row in rows_of.values() for batch in row})
    table = Table("draft length", *(f"batch {b}" for b in batches), title="milliseconds per engine step")
    for k, row in rows_of.items():
        table.add_row("no drafter" if k < 0 else str(k), *(f"{1e3 * row[b]:.2f}" if b in row else "" for b in batches))
    return table
