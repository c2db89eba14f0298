"""Whether a recipe's policy and drafter can be used: looked up on this disk, in the Hugging Face cache, or on the hub.

Of a name on the hub only the config is fetched. What cannot be looked up is reported and stops no run: another node may
have it.
"""

import os
from dataclasses import dataclass
from typing import Literal

from verl_tlt.config import TLTConfig
from verl_tlt.drafter.check import check_config, check_drafter
from verl_tlt.drafter.head_config import read_config
from verl_tlt.drafter.model_files import PICKLED, NotHereError, elsewhere, files_on_hub, folder, is_name
from verl_tlt.drafter.mtp_tensors import mtp_tensors
from verl_tlt.drafter.policy import (
    PolicyShape,
    aux_layers_for,
    draft_vocab_size,
    has_latent_attention,
    policy_shape,
    read_model_config,
    unsupported,
)
from verl_tlt.drafter.tensor_file import tensor_files
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG

POLICY, DRAFTER, METHOD = "actor_rollout_ref.model.path", "tlt.drafter.path", "tlt.drafter.method"


@dataclass(frozen=True)
class Finding:
    """What one rule of the doctor says about one thing."""

    level: Literal["ok", "warn", "if", "refuse"]
    """`if`: TLT can run on a machine that has what this one lacks, or once something else is done."""
    what: str
    """The key, package or file in question."""
    sentence: str


def check_policy(path: str, method: str = "eagle3") -> Finding:
    """Whether a head of this method can draft for the model at `path`, a folder or a name on the hub."""
    key = f"{POLICY}={path}"
    if not path:
        return Finding("refuse", POLICY, f"{POLICY} is not set.")
    if elsewhere(path):
        return Finding("warn", POLICY, f"{key} is on another file system, so its family was not checked from here.")
    if _no_folder(path):
        return Finding("if", POLICY, f"{key} is not a directory on this machine{_read_as(path)}.")
    try:
        fields = read_model_config(path)
        family = str(fields.get("model_type"))
        why = unsupported(family, fields.get("architectures") or (), has_latent_attention(fields))
        if method == "eagle3" and why:
            return Finding("refuse", POLICY, f"{key} is a {family} model, and {why}.")
        from verl_tlt.drafter.verifier import check_policy_files

        here = check_policy_files(located(path), method, fetch=False)
    except NotHereError as error:
        return Finding("warn", POLICY, f"{str(error).rstrip('.')}, so the family of {POLICY} was not checked.")
    except DrafterError as error:
        return Finding("refuse", POLICY, f"{POLICY}: {error}")
    unread = "" if here else "; its weights are not on this machine and were not checked"
    return Finding("ok", POLICY, f"{POLICY} is a {family} model, which drafters are made for{unread}")


def check_recipe_drafter(settings: TLTConfig, policy: str, context: int) -> Finding:
    """Whether the drafter of the recipe's settings can draft for its policy; `context`: longest sequence, in tokens."""
    if settings.drafter.method == "mtp":
        own = _mtp_head(policy)  # engines start with it, whichever is published then
        if settings.drafter.path is None or own.level == "refuse":
            return own
    path = settings.drafter.path
    if path is not None and elsewhere(path):
        copy = "copy it to a folder that every node sees"
        return Finding("refuse", DRAFTER, f"{DRAFTER}={path} is on another file system: {copy}.")
    if path is not None and _no_folder(path):
        return Finding("if", DRAFTER, f"{DRAFTER}={path} is not a directory on this machine{_read_as(path)}.")
    try:
        shape: PolicyShape | None = policy_shape(located(policy))
    except DrafterError:
        shape = None  # `check_policy` says so; the trainer checks again once the policy is there
    try:
        if path is None:
            return _new_drafter(settings, shape)
        positions = context + settings.speculation.max_draft_length
        return _given_drafter(path, settings.drafter.method, policy, shape, positions)
    except NotHereError as error:
        return Finding("warn", DRAFTER, f"{str(error).rstrip('.')}, so whether {DRAFTER} fits was not checked.")
    except DrafterError as error:
        return Finding("refuse", DRAFTER, str(error) if path is None else f"{DRAFTER}: {error}")


def _new_drafter(settings: TLTConfig, shape: PolicyShape | None) -> Finding:
    """Whether a new drafter can be made for a policy of this shape (None: unknown); else a `DrafterError`."""
    if shape is not None:
        draft_vocab_size(settings.drafter.vocab, shape.vocab_size, "tlt.drafter.vocab")
        aux_layers_for(shape.num_layers)
    return Finding("ok", DRAFTER, "no drafter given: it starts from a random head and drafts once that pays")


def _mtp_head(policy: str) -> Finding:
    """Whether the policy's files hold its MTP head, as far as they are here."""
    unknown = f"whether {POLICY} holds an MTP head was not checked."
    if _no_folder(policy):
        return Finding("warn", METHOD, f"{POLICY} is not here, so {unknown}")
    try:
        tensors = mtp_tensors(located(policy), fetch=False)
    except NotHereError as error:
        return Finding("warn", METHOD, f"{str(error).rstrip('.')}, so {unknown}")
    except DrafterError as error:
        return Finding("refuse", METHOD, f"{METHOD}=mtp: {error}")
    return Finding("ok", METHOD, f"the policy's own MTP head drafts ({len(tensors)} tensors)")


def _given_drafter(path: str, method: str, policy: str, shape: PolicyShape | None, positions: int) -> Finding:
    """Whether the drafter at `path` fits, as far as files are here; a `DrafterError` where it does not."""
    if shape is None:
        kind = check_config(folder(located(path), (CONFIG,)))
        unknown = f"whether it fits was not checked, since the config of {POLICY} cannot be read here"
        finding = Finding("warn", DRAFTER, f"{DRAFTER}={path} is a drafter for {METHOD}={kind}; {unknown}.")
    elif is_name(path) and not _has_weights(path):
        cached = folder(path, (CONFIG,))
        kind = check_config(cached)
        if kind == "eagle3":
            read_config(cached, shape, positions)
        files = files_on_hub(path)
        if files and not any(file.endswith(".safetensors") for file in files):
            raise DrafterError(f"{path} has no safetensors on the hub: {PICKLED}.")
        later = "fits by its config; its weights are fetched when the run starts, and were not checked"
        finding = Finding("warn", DRAFTER, f"{DRAFTER}={path} {later}.")
    else:
        kind = check_drafter(located(path), located(policy), positions).method
        finding = Finding("ok", DRAFTER, f"{DRAFTER} is usable")
    if kind != method:
        raise DrafterError(f"{path} holds a drafter for {METHOD}={kind}, not {method}.")
    return finding


def _has_weights(drafter: str) -> bool:
    """Whether the weights of a drafter on the hub are in the local cache."""
    try:
        for file in tensor_files(drafter, fetch=False)[1].values():
            folder(drafter, (file,), fetch=False)
    except NotHereError:
        return False
    return True


def _no_folder(path: str) -> bool:
    return not is_name(path) and not os.path.isdir(absolute(path))


def _read_as(path: str) -> str:
    """Where a path that is not absolute leads, in brackets."""
    return "" if os.path.isabs(path) else f" ({absolute(path)})"


def located(path: str) -> str:
    """A model's folder as an absolute path; a name on the hub, or an address on another file system, as it is."""
    return path if is_name(path) or elsewhere(path) else absolute(path)


def absolute(path: str) -> str:
    """`path` with `~` and the working directory filled in."""
    return os.path.abspath(os.path.expanduser(path))
