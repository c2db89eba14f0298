"""`verl.plugins` entry point: with `trainer.plugin=tlt` the run becomes a TLT run or does not start.

verl loads this module in every process, while verl itself is half imported, and drops its errors at debug level.
So it uses the standard library only, cannot raise, and merely arms post-import hooks: the driver's
`verl.utils.config.validate_config`, which `main_ppo` calls before Ray starts, and the trainer lookup of the
process that builds the trainer. Whether that worked is `armed()`; the Hydra search-path plugin
(`hydra_plugins/verl_tlt_search.py`) asks, because an entry point that failed cannot refuse anything itself.
Without the flag both hooks call straight through, and nothing else of verl-tlt is imported, unless the config says
something that was meant for TLT and would do nothing (`verl_tlt.flag`): that is refused. A verl with
`patches/verl/0001` loads the plugin it is asked for by itself (`activation.configure`, entry point
`verl.trainer_plugins`); then there is nothing to hook.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from verl_tlt import MODE_PREFIX, flag

CONFIG_MODULE = "verl.utils.config"
TRAINER_MODULE = "verl.trainer.ppo.v1.trainer_base"

logger = logging.getLogger(__name__)
_state = {"armed": False}


def native() -> bool:
    """Whether this verl knows `trainer.plugin` itself; looked up as a file, since verl is half imported here."""
    folders = getattr(sys.modules.get("verl"), "__path__", [])
    return any(os.path.isfile(os.path.join(folder, "trainer", "plugin.py")) for folder in folders)


def armed() -> bool:
    """Whether a driver in this process would see the flag: the hook waits, or sits on `validate_config` already."""
    if native():
        return True
    module = sys.modules.get(CONFIG_MODULE)
    if module is None or not hasattr(module, "validate_config"):
        return _state["armed"]
    return getattr(module.validate_config, "_verl_tlt", False)


def _wrap_validate_config(module: Any) -> None:
    original = module.validate_config
    if getattr(original, "_verl_tlt", False):
        return

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        if not _asked(config):
            _refuse_a_mistake(config)
            return original(config, *args, **kwargs)
        try:
            import verl_tlt.activation as activation
        except Exception as error:
            raise SystemExit(
                f"verl-tlt: trainer.plugin=tlt cannot run because verl_tlt.activation does not import "
                f"({type(error).__name__}: {error})."
            ) from error
        settings = activation.check(config)
        result = original(config, *args, **kwargs)
        activation.apply(config, settings)
        return result

    validate_config._verl_tlt = True  # type: ignore[attr-defined]
    module.validate_config = validate_config
    package: Any = sys.modules.get(CONFIG_MODULE.rpartition(".")[0])
    if package is not None and getattr(package, "validate_config", None) is original:
        package.validate_config = validate_config  # verl.utils re-exports it


def _asked(config: Any) -> bool:
    """Whether the run is to be a TLT run.

    Raises:
        SystemExit: the config does not say: its value cannot be read.
    """
    try:
        return flag.wanted(config)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SystemExit(f"verl-tlt: trainer.plugin or trainer.v1.trainer_mode cannot be read: {said}.") from None


def _refuse_a_mistake(config: Any) -> None:
    """Stop a run that was meant to be a TLT run and would silently be a stock one.

    Raises:
        SystemExit: one sentence that names the key.
    """
    try:
        sentence = flag.mistaken(config)
    except Exception:
        logger.warning("verl-tlt could not look for misspelt flags in this config.", exc_info=True)
        return
    if sentence:
        raise SystemExit(f"verl-tlt: {sentence}")


def _wrap_get_trainer_cls(module: Any) -> None:
    """Register the TLT trainers when one is asked for, in the process that will build it (Ray's TaskRunner)."""
    original = module.get_trainer_cls
    if getattr(original, "_verl_tlt", False):
        return

    @functools.wraps(original)
    def get_trainer_cls(name: str) -> Any:
        if str(name).startswith(MODE_PREFIX):
            from verl_tlt.trainer.register import register_trainers

            register_trainers()
        return original(name)

    get_trainer_cls._verl_tlt = True  # type: ignore[attr-defined]
    module.get_trainer_cls = get_trainer_cls


def arm() -> None:
    """Install both hooks, unless verl needs none; calling it again changes nothing that is already wrapped."""
    if native():
        return
    from verl_tlt.compat.import_hooks import when_imported

    when_imported(CONFIG_MODULE, _wrap_validate_config)
    when_imported(TRAINER_MODULE, _wrap_get_trainer_cls)
    _state["armed"] = True


try:
    arm()
except Exception:
    # verl would hide this; `armed()` stays False, so a run with the flag is refused and any other run is stock.
    logger.warning("verl-tlt could not install its hooks; runs with trainer.plugin=tlt will be refused.", exc_info=True)
