"""`verl.plugins` entry point: with `trainer.plugin=tlt` the run becomes a TLT run or does not start.

verl loads this module in every process, while verl itself is half imported, and drops its errors at debug level.
So it imports nothing but the standard library and wrapt, and does nothing but this:

* In the process of `verl.trainer.main_ppo` it lets Hydra take TLT's overrides with or without a plus.
* It hooks `verl.utils.config.validate_config`, which `main_ppo` calls before Ray starts.
* It hooks `run_ppo`, which verl's experimental trainers call without that.
* It hooks the look-up of the trainer's class, in the process that builds the trainer.

Without the switch the hooks call straight through, and nothing else of verl-tlt is imported.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_tlt import MODE_PREFIX, capture, flag  # noqa: F401 (`capture` acts where a command of ours captures)

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_MODULE = "verl.utils.config"
MAIN_MODULE = "verl.trainer.main_ppo"
TRAINER_MODULE = "verl.trainer.ppo.v1.trainer_base"

logger = logging.getLogger(__name__)


def _asked_for() -> bool:
    """Whether the command line switches TLT on; a config file may, too."""
    return any(word.lstrip("+").lower() == f"{flag.SWITCH}={flag.NAME}" for word in sys.argv)


def _unhooked(module: ModuleType, name: str) -> Callable[..., Any] | None:
    """A function of verl that is to be hooked; None where it is hooked already, or where this verl has none."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        sentence = f"verl-tlt: this verl has no {module.__name__}.{name}, so it cannot run with TLT."
        if _asked_for():
            raise SystemExit(sentence)
        logger.warning(sentence)
        return None
    if getattr(function, "_verl_tlt", False):
        return None
    return function


def _wrap_validate_config(module: ModuleType) -> None:
    """Check and rewrite a TLT run's config around verl's own validation; other runs go straight through."""
    original = _unhooked(module, "validate_config")
    if original is None:
        return

    @functools.wraps(original)
    def validate_config(config: DictConfig, *args: object, **kwargs: object) -> object:
        if not _is_tlt_run(config):
            return original(config, *args, **kwargs)
        try:
            import verl_tlt.activation as activation
        except Exception as error:
            remedy = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            raise SystemExit(
                f"verl-tlt: trainer.plugin=tlt cannot run because verl_tlt.activation does not import "
                f"({type(error).__name__}: {error}){remedy}."
            ) from error
        settings = activation.check(config)
        result = original(config, *args, **kwargs)
        activation.apply(config, settings)
        return result

    validate_config._verl_tlt = True  # type: ignore[attr-defined]
    vars(module)["validate_config"] = validate_config
    package = sys.modules.get(CONFIG_MODULE.rpartition(".")[0])
    if package is not None and getattr(package, "validate_config", None) is original:
        vars(package)["validate_config"] = validate_config  # verl.utils re-exports it


def _wrap_run_ppo(module: ModuleType) -> None:
    """Refuse a TLT run of a program that does not call `validate_config`, such as verl's experimental trainers.

    These have no hooks that say when devices are idle or a drafter can be published.
    """
    original = _unhooked(module, "run_ppo")
    if original is None:
        return

    @functools.wraps(original)
    def run_ppo(config: DictConfig, *args: object, **kwargs: object) -> object:
        if _is_tlt_run(config) and not str(config.trainer.v1.trainer_mode).startswith(MODE_PREFIX):
            raise SystemExit(
                f"verl-tlt: {flag.SWITCH}={flag.NAME} works with {flag.MAIN} only, not with verl's experimental "
                "trainers, nor with programs that call run_ppo without verl.utils.config.validate_config."
            )
        return original(config, *args, **kwargs)

    run_ppo._verl_tlt = True  # type: ignore[attr-defined]
    vars(module)["run_ppo"] = run_ppo


def _is_tlt_run(config: DictConfig) -> bool:
    """Whether the run is to be a TLT run; `SystemExit` where it is neither that nor a stock one (`flag.refusal`)."""
    try:
        wanted = flag.wanted(config)
        sentence = flag.refusal(config)
    except Exception as error:  # an interpolation that leads nowhere
        lines = str(error).splitlines()
        why = lines[0].rstrip(".") if lines else type(error).__name__
        raise SystemExit(f"verl-tlt: trainer.plugin, trainer.v1.trainer_mode or tlt cannot be read: {why}.") from None
    if sentence:
        raise SystemExit(f"verl-tlt: {sentence}")
    return wanted


def _wrap_get_trainer_cls(module: ModuleType) -> None:
    """Register the TLT trainers when one is asked for, in the process that will build it (Ray's TaskRunner)."""
    original = _unhooked(module, "get_trainer_cls")
    if original is None:
        return

    @functools.wraps(original)
    def get_trainer_cls(name: str) -> type:
        if str(name).startswith(MODE_PREFIX):
            from verl_tlt.trainer.mixin import register_trainers

            register_trainers()
        return original(name)

    get_trainer_cls._verl_tlt = True  # type: ignore[attr-defined]
    vars(module)["get_trainer_cls"] = get_trainer_cls


def read_command_line() -> None:
    """Have Hydra take TLT's overrides, which it reads after this."""
    if flag.started_program(sys.argv, sys.orig_argv).endswith(flag.MAIN):
        sys.argv[1:] = flag.joined(sys.argv[1:])


# Changes verl: patches/README.md#a-run-with-trainerplugintlt-is-a-tlt-run-or-does-not-start
def install_hooks() -> None:
    """Install the hooks. Calling it again changes nothing that is already wrapped.

    wrapt calls a hook at once if its module is already imported, even half executed. None of these is imported yet when
    verl loads plugins.
    """
    from wrapt import register_post_import_hook

    register_post_import_hook(_wrap_validate_config, CONFIG_MODULE)
    register_post_import_hook(_wrap_run_ppo, MAIN_MODULE)
    register_post_import_hook(_wrap_get_trainer_cls, TRAINER_MODULE)


read_command_line()
try:
    install_hooks()
except Exception as error:
    if _asked_for():
        raise SystemExit(
            f"verl-tlt: its hooks cannot be installed ({error}), so this run cannot be a TLT run."
        ) from error
    logger.warning("verl-tlt could not install its hooks, so no run is a TLT run.", exc_info=True)  # verl would hide it
