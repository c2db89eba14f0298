"""Hydra side of verl-tlt: finds `+tlt=default`, and stops a run that asks for TLT where the plugin did not load.

verl hides an entry point that fails to import, and `VERL_USE_EXTERNAL_PLUGINS=none` skips it altogether; either way
`trainer.plugin=tlt` would train silently without TLT. Hydra calls search-path plugins in every Hydra application of
this environment and does not guard the call, so this file uses Hydra and the standard library only, and nothing
but the deliberate refusal may leave it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

logger = logging.getLogger(__name__)

FLAG = re.compile(r"""^\+{0,2}(trainer\.plugin=['"]?tlt['"]?|tlt(@[^=]*|\.[^=]+)?=.+)$""", re.IGNORECASE)
"""What asks for TLT, and its settings: where the plugin is loaded, it refuses these without the flag itself."""
OFF = re.compile(r"^\+{0,2}trainer\.plugin=(null|None|~)?$")
OWN_CONFIG = re.compile(r"--config|-c[npd]|\+{0,2}hydra\.searchpath")
MAIN = "verl.trainer.main_ppo"
OTHERS = ("verl.experimental.fully_async_policy.fully_async_main", "verl.experimental.one_step_off_policy.main_ppo")
"""verl's experimental trainers: built directly, without the hooks by which TLT knows when devices are idle and when a
drafter has to be published, and the first one without the validation in which the plugin could refuse."""


class VerlTLTSearchPath(SearchPathPlugin):
    """Adds `pkg://verl_tlt.conf` to every search path; guards verl's command line."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes.

        Raises:
            SystemExit: the command line asks for TLT and verl has not loaded the plugin.
        """
        reason = None
        try:
            search_path.append(provider="verl-tlt", path="pkg://verl_tlt.conf")
            reason = refusal(sys.argv[1:], sys.modules, os.environ)
        except Exception:
            logger.warning("verl-tlt could not look at this Hydra application; it is left as it is.", exc_info=True)
        if reason:
            raise SystemExit(f"verl-tlt: {reason}")


def refusal(argv: Sequence[str], modules: Mapping[str, ModuleType], environ: Mapping[str, str]) -> str | None:
    """Why a run with this command line must not start, in one sentence; None if it may.

    Args:
        argv: arguments after the program name.
        modules: `sys.modules`: what verl has loaded by the time Hydra composes.
        environ: where verl's own plugin switch is.
    """
    if "verl" not in modules or not any(FLAG.match(argument) for argument in argv):
        return None
    if any(OFF.match(argument) for argument in argv):
        return None
    main = next((name for name in OTHERS if name in modules), _main_name(modules.get("__main__")))
    if main and main.startswith("verl.") and main != MAIN:
        return f"trainer.plugin=tlt works with {MAIN}, and this is {main}."
    plugin = modules.get("verl_tlt.plugin")
    if plugin is not None and plugin.armed():
        # A config of the user's own may have what verl's released config lacks.
        own = main != MAIN or any(OWN_CONFIG.match(argument) for argument in argv)
        return None if own else importlib.import_module("verl_tlt.flag").misspelt(argv)
    policy = environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "tlt" not in policy.split(","):
        return f"trainer.plugin=tlt needs the plugin that VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading."
    return f"trainer.plugin=tlt was asked for, but verl could not load the plugin{_cause()}."


def _main_name(main: ModuleType | None) -> str | None:
    """Name of the module run with `python -m`; None for a script."""
    return getattr(getattr(main, "__spec__", None), "name", None)


def _cause() -> str:
    try:
        importlib.import_module("verl_tlt.plugin")
    except Exception as error:
        return f" ({type(error).__name__}: {error})"
    return "; is verl-tlt installed with its entry points (`verl-tlt doctor` tells)"
