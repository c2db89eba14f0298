"""Which folder a model is in, and the files of a model on the hub.

A name on the hub is looked up in the local cache, then on the hub; only the files asked for are fetched.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_tlt.errors import DrafterError

Model = str | os.PathLike[str]
"""A folder, or a name on the hub such as "Qwen/Qwen3-8B"."""
_NAME = re.compile(r"\w(?:[\w-]|\.(?!\.))*/\w(?:[\w-]|\.(?!\.))*")
"""Owner and model; neither begins with a dot or holds two in a row, so that no name leads out of the cache."""
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*):/{1,2}")
"""How the address of a model on another file system begins; `Path` makes one slash of its two."""

ASK_S = 10.0
"""Seconds to wait for the hub's answer about a model."""
PICKLED = "pickled weights are not read, because that can run code: docs/drafter.md shows how to write them anew"


class NotHereError(DrafterError):
    """Files of a model on the hub are not on this disk and could not be fetched; the message says why."""


def is_name(model: Model) -> bool:
    """Whether `model` can only be a name on the hub; a `DrafterError` where it is neither text nor path."""
    if not isinstance(model, str | os.PathLike):
        given = f"not as a {type(model).__name__} (save_pretrained makes a folder of a model)"
        raise DrafterError(f"A model is given as a folder or as a name on the hub, {given}.")
    text = os.fspath(model)
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


def elsewhere(model: Model) -> str | None:
    """The address of a model on another file system, such as hdfs://node/model; None: it is a folder or a name."""
    text = os.fspath(model)
    match = _ADDRESS.match(text)
    if match is None or os.path.exists(text):
        return None
    return f"{match[1]}://{text[match.end() :]}"


def folder(model: Model, any_of: Sequence[str], besides: Sequence[str] = (), fetch: bool = True) -> Path:
    """The local folder of a model. That of a model on the hub has one or more files of `any_of`.

    Files that are not in the cache are fetched if `fetch` (else `NotHereError`), with `besides` where the hub has them.
    """
    if not is_name(model):
        if address := elsewhere(model):
            raise DrafterError(f"{address} is on another file system: copy it here, and give its folder.")
        return Path(os.path.expanduser(model))
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    name = os.fspath(model)
    offline = "it is not in the local cache, and HF_HUB_OFFLINE is set"
    try:
        here = _cached_folder(name, any_of)
        if here is not None:
            if fetch:
                _fetch_into(here, name, besides)
            return here
        snapshot = Path(snapshot_download(name, allow_patterns=[*any_of, *besides])) if fetch else None
    except RepositoryNotFoundError as error:
        raise NotHereError(f"{name} is no folder here, and no model on the hub that you may read.") from error
    except hub_errors() as error:
        why = offline if constants.HF_HUB_OFFLINE else f"{type(error).__name__}, {first_line(error)}"
        raise NotHereError(f"{name} is no folder here and could not be fetched: {why}.") from error
    if snapshot is None:
        raise NotHereError(f"{name}: {' or '.join(any_of)} is not in the local cache.")
    if not any((snapshot / file).is_file() for file in any_of):
        if constants.HF_HUB_OFFLINE:  # the hub was not asked
            raise NotHereError(f"{name}: {' or '.join(any_of)} is not here, since {offline}.")
        missing = f"{name} has no {' or '.join(any_of)} on the hub ({PICKLED})"
        raise NotHereError(f"{missing}, or the hub could not be reached and the local cache has none.")
    return snapshot


def files_on_hub(name: str) -> list[str]:
    """Names of all files of a model on the hub; empty where the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(name, timeout=ASK_S)
    except hub_errors():
        return []
    return [file.rfilename for file in found.siblings or ()]


def hub_errors() -> tuple[type[Exception], ...]:
    """The errors of huggingface_hub where the hub cannot be reached or lacks a file.

    httpx raises some of them, as for a proxy that refuses, and hf_xet a `RuntimeError`.
    """
    from httpx import HTTPError

    return OSError, ValueError, RuntimeError, HTTPError


def _cached_folder(name: str, any_of: Sequence[str]) -> Path | None:
    """The local cache's folder of a model, if it has a file of `any_of`."""
    from huggingface_hub import try_to_load_from_cache

    for file in any_of:
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _fetch_into(cached_folder: Path, name: str, files: Sequence[str]) -> None:
    """Fetch files of the same commit into a model's folder of the local cache, where the hub has them."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    commit = cached_folder.name
    for file in files:
        if try_to_load_from_cache(name, file, revision=commit) is None:  # neither there nor known not to exist
            with suppress(*hub_errors()):
                hf_hub_download(name, file, revision=commit)


def first_line(error: Exception) -> str:
    """The first line of another package's error, for the end of a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
