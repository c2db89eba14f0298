"""A recipe's policy and drafter, looked at: on this disk, in the local Hugging Face cache, or on the hub.

Of a name on the hub no more than the config is fetched here. What cannot be looked at from this machine is said, with
the reason, and does not stop a run: another node may well have it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_tlt.compat.families import serves_eagle3
from verl_tlt.compat.versions import installed
from verl_tlt.config import TLTConfig
from verl_tlt.drafter.check import WEIGHTS, check_drafter, check_owner, read_config
from verl_tlt.drafter.hub import NotHereError, folder, is_name
from verl_tlt.drafter.policy import (
    CONFIG,
    UNTESTABLE,
    DrafterError,
    aux_layers_for,
    check_aux_layers,
    policy_shape,
    read_json,
    unsupported,
)

POLICY, DRAFTER = "actor_rollout_ref.model.path", "tlt.drafter.path"


@dataclass(frozen=True)
class Look:
    """What was found out about one model."""

    family: str | None = None
    """`model_type` of its config; None where that was not read."""
    problem: str | None = None
    """Why it cannot be used, in one sentence that names key or file."""
    unseen: str | None = None
    """What could not be checked from here, and why, in one sentence."""


def look_at_policy(path: str) -> Look:
    """Whether drafters can be built for the model at `path`, a folder or a name on the hub."""
    key = f"{POLICY}={path}"
    if not path:
        return Look(problem=f"{POLICY} is not set.")
    if "://" in path:
        return Look(unseen=f"{key} is on another file system, so its family was not checked from here.")
    here = os.path.expanduser(path)
    if not is_name(path) and not os.path.isdir(here):
        return Look(problem=f"{key} is not a directory on this machine.")
    try:
        file = folder(path, (CONFIG,)) / CONFIG
        if not file.is_file():
            return Look(problem=f"{key} holds no config.json, so it is not a Hugging Face model.")
        fields = read_json(file)
        family = str(fields.get("model_type"))
        served, by_vllm = _served_by_vllm(fields)
        if why := unsupported(family):
            known = family in UNTESTABLE or served is None
            return Look(family, f"{key} is a {family} model, and {why}{'' if known else f': {by_vllm}'}.")
        if served is False:
            return Look(family, f"{key} is a {family} model, and {by_vllm}.")
        policy_shape(file.parent)
    except NotHereError as error:
        return Look(unseen=f"{str(error).rstrip('.')}, so the family of {POLICY} was not checked.")
    except DrafterError as error:
        return Look(problem=f"actor_rollout_ref.model.path: {error}")
    return Look(family)


def _served_by_vllm(fields: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Whether the installed vLLM serves a head beside a model with this config, None where it cannot tell; in words."""
    architecture = next(iter(fields.get("architectures") or ()), "")
    served = serves_eagle3(architecture) if architecture else None
    if served:
        return served, f"vLLM would serve a head beside {architecture}, but none was made and tested yet"
    return served, f"vLLM {installed('vllm')} serves no EAGLE-3 head beside {architecture}"


def look_at_drafter(settings: TLTConfig, policy: str, context: int) -> Look:
    """Whether the drafter the user named, or a new one of these settings, can draft for this policy.

    Args:
        settings: of the recipe.
        policy: as the recipe names it.
        context: longest prompt and response, in tokens.
    """
    path = settings.drafter.path
    if path is not None and not is_name(path) and not os.path.isdir(os.path.expanduser(path)):
        return Look(problem=f"{DRAFTER}={path} is not a directory on this machine.")
    try:
        shape = policy_shape(located(policy))
    except DrafterError:
        return Look()  # told about the policy already; the trainer checks again once it is there
    try:
        if path is None and settings.drafter.aux_layers is not None:
            check_aux_layers(settings.drafter.aux_layers, shape.num_layers, "tlt.drafter.aux_layers")
        elif path is None:
            aux_layers_for(shape.num_layers)
        elif is_name(path) and not _fetched(path):
            read_config(folder(path, (CONFIG,)), shape, context + settings.speculation.longest)
            return Look(unseen=f"{DRAFTER}={path} fits by its config; its weights are fetched when the run starts.")
        else:
            check_owner(located(path))
            check_drafter(located(path), located(policy), context + settings.speculation.longest)
    except NotHereError as error:
        return Look(unseen=f"{str(error).rstrip('.')}, so whether {DRAFTER} fits was not checked.")
    except DrafterError as error:
        return Look(problem=str(error) if path is None else f"tlt.drafter.path: {error}")
    return Look()


def _fetched(drafter: str) -> bool:
    """Whether the weights of a drafter on the hub are in the local cache."""
    try:
        folder(drafter, (WEIGHTS,), fetch=False)
    except NotHereError:
        return False
    return True


def located(path: str) -> str:
    """A model's folder as any process finds it, with `~` and the working directory filled in; a hub's name as it is."""
    return path if is_name(path) else os.path.abspath(os.path.expanduser(path))
