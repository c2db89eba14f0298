"""`verl-tlt doctor`: can TLT run here? Findings on packages and recipe, an answer in a line, and what to do next.

`--gpu` starts the recipe's engine in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import verl_tlt
from verl_tlt.checks import rules
from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import (
    ROLLOUT,
    Recipe,
    compose,
    device_of,
    devices,
    likely_meant,
    number,
    read_settings,
    select,
    trainer_mode,
)
from verl_tlt.commands.console import say
from verl_tlt.commands.options import DoctorOptions
from verl_tlt.config import TLTConfigError
from verl_tlt.drafter.model_files import first_line
from verl_tlt.errors import TLTError, needs
from verl_tlt.files.disk import check_writable, replacing
from verl_tlt.flag import NAME, SWITCH
from verl_tlt.upstream.versions import installed, location

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tlt.commands.doctor.engine_check import Answer

STYLES = {"ok": "green", "warn": "yellow", "if": "bold yellow", "refuse": "bold red"}
LABELS = {"ok": "ok", "warn": "warning", "if": "missing", "refuse": "refused"}


def doctor(options: DoctorOptions, console: Console) -> int:
    """Print the findings, the answer and the next command.

    Without `--all` findings that all is well are only counted, except for those of a measured engine.

    Returns the exit status: 0: TLT can run; 1: it cannot; 3: it can on a machine that has what this one lacks, or once
    the switch is set.
    """
    if options.gpu and not options.names_a_run():
        raise TLTError("--gpu measures the engine of your recipe: give its command after --, or its overrides.")
    if options.gpu:  # before anything is measured
        if options.out.is_dir():
            raise TLTError(f"--out {options.out} is a folder: name a file.")
        check_writable(options.out.parent, "the folder of --out")
    recipe = options.recipe()
    has_recipe = options.names_a_run()
    findings = diagnose(recipe if has_recipe else None)
    measured: list[Finding] = []
    if options.gpu and not is_refused(findings):
        measured = measure_engine(recipe, options, console)
    answer, status = conclude([*findings, *measured], has_recipe)
    shown = [*findings, *measured]
    if not options.all:
        wrong = [f for f in findings if f.level != "ok"]
        say(console, f"{len(findings) - len(wrong)} checks OK (--all lists them).")
        shown = [f for f in (*wrong, *measured) if f.sentence not in answer]
    for finding in shown:
        about = "" if finding.sentence.startswith(finding.what) else f"{finding.what}: "
        say(console, f"{LABELS[finding.level]:7} {about}{finding.sentence}", STYLES[finding.level])
    say(console, answer, "bold")
    if status != 1:
        say(console, f"Next: {next_step(options.gpu, has_recipe)}.")
    return status


def diagnose(recipe: Recipe | None) -> list[Finding]:
    """Findings for this environment, and for a recipe if one is given."""
    findings = rules.examine_packages()
    if recipe is not None and installed("verl") is not None:
        try:
            with recipe.composed() as config:
                findings.insert(0, rules.switched_on(config))
                findings += rules.examine(config, read_settings(config))
                findings += [*unread_keys(recipe, config), *examine_gpus(config)]
                if not is_refused(findings):
                    findings.append(build_dataclasses(config))
        except TLTConfigError as error:
            findings.append(Finding("refuse", "settings", str(error)))
        except ModuleNotFoundError as error:
            findings.append(Finding("refuse", "packages", needs(error)))
        except ImportError as error:  # such as a library of CUDA that torch does not find
            broken = f"verl, or a package that it needs, cannot be imported: {first_line(error)}."
            findings.append(Finding("refuse", "packages", broken))
    for package in ("verl", "vllm"):
        folder = location(package)
        if folder is not None:
            findings.append(_imported_from(package, folder))
    return findings


def is_refused(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "refuse" for finding in findings)


def _imported_from(package: str, folder: Path) -> Finding:
    """Name the folder that a package is imported from, with a warning where it hides an installed one.

    Python looks in the working directory first, so a clone or a folder of that name hides the installed package.
    """
    what = f"{package}'s folder"
    spec = importlib.util.find_spec(package)
    found = list(spec.submodule_search_locations or ()) if spec else []
    if not found or os.path.realpath(found[0]) == os.path.realpath(folder):
        return Finding("ok", what, f"{package} is read in {folder}")
    return Finding("warn", what, f"{package} is read in {folder}, which hides that in {found[0]}.")


def conclude(findings: Sequence[Finding], has_recipe: bool) -> tuple[str, int]:
    """The doctor's answer in a sentence, and the command's exit status."""
    refused = [finding.sentence for finding in findings if finding.level == "refuse"]
    if refused:
        others = f" ({len(refused) - 1} more above)" if len(refused) > 1 else ""
        return f"No: {refused[0]}{others}", 1
    missing = [finding for finding in findings if finding.level == "if"]
    elsewhere = [finding.sentence for finding in missing if finding.what != SWITCH]
    if elsewhere:
        return f"OK, except on this machine: {' '.join(elsewhere)}", 3
    if missing:  # the switch alone
        return f"OK, but {missing[0].sentence}", 3
    if not has_recipe:
        return "OK: TLT can run with the packages installed here. Give your recipe to have it checked too.", 0
    return "OK: TLT can run here.", 0


def next_step(gpu: bool, has_recipe: bool) -> str:
    """The command that a user would go on with; `gpu`: the engine was measured."""
    if not has_recipe:
        return "verl-tlt doctor -- bash your_recipe.sh"
    measures = "verl-tlt compare" if gpu else "verl-tlt doctor --gpu"
    return f"{measures}, with the same recipe"


def unread_keys(recipe: Recipe, config: DictConfig) -> Iterator[Finding]:
    """A warning for each value that was added outside of the config's own nodes, as by a key without its path."""
    search_path = [word for word in recipe.overrides if word.startswith("hydra.")]  # where the config finds others
    nodes = {*compose(search_path, recipe.config, recipe.folder), NAME}
    added = [word.lstrip("+").partition("=")[0] for word in recipe.overrides if word.startswith("+")]
    for key in added:
        node = key.partition(".")[0]
        if node not in nodes and isinstance(select(config, key), int | float | str):
            yield Finding("warn", key, f"verl does not read {key}.{likely_meant(key, config)}")


def build_dataclasses(config: DictConfig) -> Finding:
    """Whether verl's own dataclasses take the recipe; a key that Hydra was told to add is refused here."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    for node in (ROLLOUT, "actor_rollout_ref.actor"):
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, node))
        except Exception as error:  # whatever verl's checks and the classes themselves raise
            reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
            return Finding("refuse", node, f"verl does not take {node} of this recipe: {reason[:300]}.")
    return Finding("ok", "verl's dataclasses", "verl takes the rollout's and the actor's settings")


def examine_gpus(config: DictConfig) -> list[Finding]:
    """Whether the GPUs that the recipe asks for are seen here; no finding for a recipe that runs on other devices."""
    if device_of(config) != "cuda":
        return []
    import torch

    nodes = ["trainer"]  # each with a pool of devices of its own
    if trainer_mode(config) == "separate_async":
        nodes.append(ROLLOUT)
    if select(config, "reward.reward_model.enable_resource_pool"):
        nodes.append("reward.reward_model")
    if select(config, "distillation.enabled"):
        nodes.append("distillation")
    asked = sum(devices(config, node) for node in nodes)
    seen = torch.cuda.device_count()
    if asked <= seen:
        return [Finding("ok", "GPUs", f"{seen} GPUs found")]
    names = [f"{node}.{name}" for node in nodes for name in ("nnodes", "n_gpus_per_node")]
    counts = " and ".join(f"{name}={number(config, name, 1)}" for name in names)
    return [Finding("if", "GPUs", f"{asked} GPUs needed ({counts}), {seen} found.")]


def measure_engine(recipe: Recipe, options: DoctorOptions, console: Console) -> list[Finding]:
    """Findings that only a real engine on this machine can give, which are also written to `--out`."""
    from verl_tlt.commands.doctor.engine_check import EngineJob, run_job

    with recipe.composed() as config:
        if not read_settings(config).speculation.enable:
            unmeasured = "tlt.speculation.enable=false: its engines are stock vLLM's, so nothing was measured"
            return [Finding("ok", "engine", unmeasured)]
    try:
        answer = run_job(EngineJob(recipe, options.seconds))
        write_report(options.out, answer)
    except (TLTError, OSError) as error:
        return [Finding("refuse", "engine", str(error))]
    say(console, f"Wrote {options.out}.")
    return answer.findings


def write_report(file: Path, answer: Answer) -> None:
    """Write what was measured, which `verl-tlt advise --costs` reads."""
    report = {
        "verl_tlt": verl_tlt.__version__,
        "hardware": answer.hardware,
        "findings": [asdict(finding) for finding in answer.findings],
        "points": answer.costs.to_list(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(json.dumps(report, indent=1).encode())
