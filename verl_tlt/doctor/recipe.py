"""A recipe composed as `main_ppo` would compose it. Imports neither verl nor torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
