"""`verl-tlt doctor`: compose a recipe as `main_ppo` would, without importing verl, and print what the doctor finds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_tlt import doctor, facts
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.doctor import Finding, judge_symbols
from verl_tlt.symbols import Symbol, check_symbols, source_root

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.table import Table


def diagnose(overrides: Sequence[str], config_name: str) -> list[Finding]:
    """Findings for this environment, and for a recipe if its overrides are given."""
    return [*examine_recipe(overrides, config_name), *examine_symbols()]


def examine_symbols() -> list[Finding]:
    """Whether the installed verl and vLLM have everything that verl-tlt relies on, read from their sources."""
    return [finding for package, checked in installed_symbols().items() for finding in judge_symbols(package, checked)]


def installed_symbols() -> dict[str, list[tuple[Symbol, str | None]]]:
    """Every symbol with what is wrong with it, by package; packages that are not installed are left out."""
    roots = {package: source_root(package) for package in ("verl", "vllm")}
    return {package: check_symbols(root, package) for package, root in roots.items() if root is not None}


def examine_recipe(overrides: Sequence[str], config_name: str) -> list[Finding]:
    """Releases, and a recipe if its overrides are given."""
    environment = facts.read_environment()
    if not overrides or environment.versions["verl"] is None:
        return doctor.examine(environment, None, TLTConfig())
    try:
        config = compose(overrides, config_name)
        settings = facts.read_settings(config)
        run = facts.read_run(config, settings)
    except TLTConfigError as error:
        return [*doctor.examine(environment, None, TLTConfig()), Finding("refuse", "settings", str(error))]
    return doctor.examine(environment, run, settings)


def compose(overrides: Sequence[str], config_name: str) -> DictConfig:
    """The verl config `config_name` with `overrides`.

    Raises:
        TLTConfigError: Hydra cannot compose it (an unknown key, a missing group).
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations  # `diagnose` asked for its version before
    directory = os.path.join(next(iter(spec.submodule_search_locations)), "trainer", "config")
    try:
        with initialize_config_dir(directory, version_base=None):
            return hydra_compose(config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise TLTConfigError(f"Hydra cannot compose {config_name} from these overrides: {reason}") from error


def table(findings: Sequence[Finding]) -> Table:
    """The findings as a table for the terminal."""
    from rich.table import Column, Table
    from rich.text import Text

    rows = Table("", Column("what", overflow="fold"), Column("finding", overflow="fold"), title="verl-tlt doctor")
    style = {"ok": "green", "warn": "yellow", "refuse": "bold red"}
    for finding in findings:
        rows.add_row(Text(finding.level, style=style[finding.level]), Text(finding.what), Text(finding.sentence))
    return rows


def symbol_table() -> Table:
    """Every symbol verl-tlt relies on, whether the installed release has it so, and which file needs it."""
    from rich.table import Column, Table
    from rich.text import Text

    rows = Table("", Column("symbol", overflow="fold"), "needed by", title="what verl-tlt relies on")
    for checked in installed_symbols().values():
        for symbol, problem in checked:
            verdict = Text("ok", style="green") if problem is None else Text("no", style="bold red")
            note = symbol.used_by + (" (CPU only)" if symbol.cpu_only else "")
            rows.add_row(verdict, Text(symbol.name + (f"\n{problem}" if problem else "")), Text(note))
    return rows
