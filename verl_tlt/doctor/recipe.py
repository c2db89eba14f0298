"""A recipe composed as `main_ppo` would compose it, from its overrides or from the script that holds them.

Imports neither verl nor torch.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAIN = "verl.trainer.main_ppo"
STAND_INS = ("python", "python3", "torchrun")
_STAND_IN = """#!/bin/sh
case "$1" in
  -c|-|-V|--version|'')
    for folder in $(printf %s "$PATH" | tr : ' '); do
      [ "$folder" != "{own}" ] && [ -x "$folder/{name}" ] && exec "$folder/{name}" "$@"
    done
    exit 127 ;;
esac
printf '%s\\0' {name} "$@" >> "{record}" && printf '\\n\\0' >> "{record}"
"""
"""Writes down what would be started instead of starting it. A line of Python goes to the real one: scripts ask it which
device there is, and compute with it.
"""

CONFIG = "ppo_trainer"
"""The top-level config of `main_ppo`."""


@dataclass(frozen=True)
class Recipe:
    """How `main_ppo` is started."""

    overrides: tuple[str, ...]
    config: str = CONFIG
    """Name of the top-level config, after its folder where that is not verl's own."""


def read_arguments(arguments: Sequence[str], config_name: str) -> Recipe:
    """A recipe as a command is given it: overrides, or a script and what is given to that.

    Raises:
        TLTConfigError: the script does not start `main_ppo`.
    """
    if arguments and arguments[0].endswith(".sh") and "=" not in arguments[0]:
        return read_script(arguments[0], arguments[1:])
    return Recipe(tuple(arguments), config_name)


def read_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Recipe:
    """Run a script with a stand-in for Python, and return how it would have started `main_ppo`.

    Other programs in the script run as it is written; other Python programs do not.

    Args:
        script: a shell script.
        arguments: given to it.
        environment: added to this process's.
        timeout_s: seconds it may take.

    Raises:
        TLTConfigError: there is no such script, or it did not start `main_ppo`.
    """
    if not os.path.isfile(script):
        raise TLTConfigError(f"{script} does not exist.")
    with tempfile.TemporaryDirectory(prefix="tlt-recipe-") as folder:
        record, errors = Path(folder) / "called", Path(folder) / "errors"
        record.touch()
        for name in STAND_INS:
            stand_in = Path(folder) / name
            stand_in.write_text(_STAND_IN.format(record=record, own=folder, name=name))
            stand_in.chmod(0o755)
        inherited = {**os.environ, **(environment or {})}
        inherited["PATH"] = f"{folder}{os.pathsep}{inherited['PATH']}"
        with errors.open("w") as stream:
            running = subprocess.Popen(
                ["bash", os.path.abspath(script), *arguments],
                env=inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream, process_group=0,
            )  # fmt: skip
            try:
                status = running.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                raise TLTConfigError(f"{script} did not come to {MAIN} within {timeout_s:.0f} s.") from error
        calls = [call.split("\0")[:-1] for call in record.read_text().split("\n\0")[:-1]]
        found = next((call for call in calls if call[1:3] == ["-m", MAIN]), None)
        if found is None:
            said = errors.read_text(errors="replace").strip().splitlines()
            instead = f"it starts `{' '.join(calls[-1][:3])}`" if calls else (said or [f"exit status {status}"])[-1]
            raise TLTConfigError(f"{script} does not start `python -m {MAIN}` here: {instead.rstrip('.')}.")
        return _parsed(found[3:])


def _parsed(words: Sequence[str]) -> Recipe:
    """Hydra's own options, and the rest."""
    options = {"--config-name": CONFIG, "--config-path": ""}
    short = {"-cn": "--config-name", "-cp": "--config-path"}
    overrides = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        option = short.get(option, option)
        if option in options:
            options[option] = value if equals else next(rest, "")
        elif not word.startswith("-"):
            overrides.append(word)
    return Recipe(tuple(overrides), os.path.join(options["--config-path"], options["--config-name"]))


def compose(overrides: Sequence[str], config_name: str) -> DictConfig:
    """The verl config `config_name` with `overrides`.

    Args:
        overrides: as given to `main_ppo`.
        config_name: see `Recipe.config`; a relative folder is one beside verl's `main_ppo`, as for Hydra.

    Raises:
        TLTConfigError: Hydra cannot compose it (an unknown key, a missing group).
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations  # `diagnose` asked for its version before
    folder, name = os.path.split(config_name)
    directory = os.path.join(next(iter(spec.submodule_search_locations)), "trainer", folder or "config")
    try:
        with initialize_config_dir(os.path.abspath(directory), version_base=None):
            return hydra_compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise TLTConfigError(f"Hydra cannot compose {config_name} from these overrides: {reason}") from error
