"""`verl-tlt doctor`: compose a recipe as `main_ppo` would, without importing verl, and print what the doctor finds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_tlt import doctor, facts
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.doctor import Finding

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.table import Table


def diagnose(overrides: Sequence[str], config_name: str) -> list[Finding]:
    """Findings for this environment, and for a recipe if its overrides are given."""
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
