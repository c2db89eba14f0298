"""Where a model's files are on this disk, whether it is given as a folder or as a name on the Hugging Face hub.

A name is looked up in the local cache, then on the hub, as transformers does it; only the files asked for are fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from verl_tlt.errors import DrafterError

Model = str | os.PathLike[str]
"""A folder, or a name on the hub such as "Qwen/Qwen3-8B"."""
_NAME = re.compile(r"\w(?:[\w-]|\.(?!\.))*/\w(?:[\w-]|\.(?!\.))*")
"""Owner and model; neither begins with a dot or holds two in a row, so that no name leads out of the cache."""


class NotHereError(DrafterError):
    """A model on the hub has not the files asked for on this disk, and they could not be fetched; it says why."""


def is_name(model: Model) -> bool:
    """Whether `model` can only be a name on the hub: it reads like one, and there is no such folder here."""
    text = os.fspath(model)
    return _NAME.fullmatch(text) is not None and not os.path.isdir(text)


def folder(model: Model, any_of: Sequence[str], besides: Sequence[str] = (), fetch: bool = True) -> Path:
    """The folder with one or more files of `any_of`; a model that is no name on the hub is returned as it is.

    What is not in the cache is asked of the hub if `fetch`, `besides` too where the hub has them (`NotHereError`).
    """
    if not is_name(model):
        return Path(os.path.expanduser(model))
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    name = os.fspath(model)
    try:
        for file in any_of:
            if isinstance(cached := try_to_load_from_cache(name, file), str):
                return Path(cached).parent
        found = Path(snapshot_download(name, allow_patterns=[*any_of, *besides])) if fetch else None
    except (OSError, ValueError) as error:
        raise NotHereError(f"{name} is no folder here and could not be fetched: {_reason(error)}.") from error
    if found is None:
        raise NotHereError(f"{name}: {' or '.join(any_of)} is not in the local cache.")
    if not any((found / file).is_file() for file in any_of):
        raise NotHereError(f"{name} has no {' or '.join(any_of)} on the hub.")
    return found


def _reason(error: Exception) -> str:
    """Why the hub gave nothing, for the end of a sentence."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "it is not in the local cache, and HF_HUB_OFFLINE is set"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}, {lines[0].rstrip('.')}"
