"""Drafters on disk: EAGLE-3 heads in the speculators format that stock vLLM serves, MTP heads as in their policy.

    config.json  model.safetensors  provenance.json  (training/training_state.safetensors, to resume)

The weights hold neither embedding nor head: vLLM then shares the policy's own, which stay current through every weight
sync. A pruned draft vocabulary brings its rows of the head and its maps, a drafter from elsewhere the head it was
trained with, and one of another width than the policy's its embedding too.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_tlt.drafter.build import default_attention, has_own_embedding, has_own_head, instantiate, make_room
from verl_tlt.drafter.check import (
    MAPS,
    PROVENANCE,
    TOKENIZER,
    check_drafter,
    drafter_folder,
    place_for,
    tokenizer_facts,
)
from verl_tlt.drafter.head_config import config_of
from verl_tlt.drafter.model_files import Model
from verl_tlt.drafter.mtp_tensors import read_head
from verl_tlt.drafter.policy import MTP, Fields, PolicyLike, policy_shape
from verl_tlt.drafter.tensor_file import WEIGHTS, Header, check_finite, not_finite, opened, read_file
from verl_tlt.drafter.verifier import is_trained
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.files.disk import CONFIG, expanded, replacing, replacing_folder
from verl_tlt.files.json_files import read_json

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.mtp.config import MTPSpeculatorConfig

logger = logging.getLogger(__name__)

STAGE_DIR = "TLT_DRAFTER_DIR"
"""Environment variable of a server and its children: the private directory in which this node's drafter is staged."""
STATE = "training/training_state.safetensors"
"""A file in a folder of its own: the folder of `config.json` holds only what is served."""
_HEADER = "state"
_TENSOR = "tensor"
"""A tensor's place in a state's JSON says its name: `{"tensor": "parameters/fc.weight"}`."""
_VERIFIER = ("verifier_lm_head.", "verifier_norm.")


def serving_tensors(
    model: Eagle3DraftModel, dtype: torch.dtype | None = None, *, without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """What vLLM loads, by speculators' names, on the host: floats in `dtype`, else float32; `without` these names."""
    policy_owned = [*_VERIFIER]
    if not has_own_embedding(model):
        policy_owned.append("embed_tokens.")
    if not (model.use_draft_vocab or has_own_head(model)):
        policy_owned.append("lm_head.")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name in without or name.startswith(tuple(policy_owned)):
            continue
        tensor = tensor.detach().cpu()
        # A clone: float32 tensors on the host would otherwise be the live weights, which training moves on.
        tensors[name] = tensor.to(dtype or tensor.dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
    return tensors


def to_drafter_file(model: Eagle3DraftModel, dtype: str) -> tuple[str, bytes]:
    """(`config.json`, bytes of `model.safetensors`) of a drafter, to be served in `dtype`.

    A `DrafterError` where a weight is not finite in it.
    """
    from safetensors.torch import save

    tensors = serving_tensors(model, getattr(torch, dtype))
    if (broken := not_finite(tensors)) is not None:
        raise DrafterError(f"The drafter's {broken} holds numbers that are not finite as {dtype}.")
    return model.config.to_json_string(), save(tensors, metadata={"format": "pt"})


def from_drafter_file(config: str, weights: bytes, attention: str) -> Eagle3DraftModel:
    """The drafter of `to_drafter_file`, in float32 on the host: files of our own, which need no check."""
    from safetensors.torch import load

    return _filled(config_of(json.loads(config)), load(weights), attention)


def stage(config: str, weights: bytes, directory: Path) -> None:
    """Write `to_drafter_file`'s files into a private directory, from which this node's engine processes load them."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The weights come last: whoever reads the new weights also finds the configuration they need.
    for name, content in ((CONFIG, config.encode()), (WEIGHTS, weights)):
        with replacing(directory / name, mode=0o600) as file:
            file.write(content)


def staged_weights() -> Path:
    """The weights that the server of this node staged."""
    return Path(os.environ[STAGE_DIR]) / WEIGHTS


def save_drafter(
    model: Eagle3DraftModel,
    directory: str | os.PathLike[str],
    provenance: Mapping[str, object],
    *,
    policy: Model | None = None,
    training_state: Mapping[str, object] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the drafter so that `directory`, which is replaced whole, is complete or what it was before.

    `provenance`: facts for `provenance.json`; a `TypeError` if they are no JSON. `policy`: its tokenizer is noted, so
    that the drafter is refused for a policy with another one. `training_state`: of `DrafterTrainer.state()`. `tensors`:
    an earlier `serving_tensors`; None: the present weights. A `DrafterError` if one is NaN or infinite, or if
    `directory` holds anything but an earlier drafter; a `TLTError` if the disk does not take it.
    """
    target = expanded(directory)
    place_for(target, "directory", replaces=True)
    tensors = serving_tensors(model) if tensors is None else tensors
    if (broken := not_finite(tensors)) is not None:
        raise DrafterError(
            f"{target} was not written: the drafter's {broken} holds NaN or infinity (refresh_verifier_weights fills "
            "head and embedding)."
        )
    facts: Fields = {**provenance, "versions": _versions()}
    if policy is not None and (vocabulary := tokenizer_facts(policy)):
        facts[TOKENIZER] = vocabulary
    with replacing_folder(target) as draft:
        (draft / CONFIG).write_text(model.config.to_json_string())
        _save_tensors(tensors, draft / WEIGHTS, {"format": "pt"})
        if training_state is not None:
            (draft / STATE).parent.mkdir()
            write_state(training_state, draft / STATE)
        for file in draft.rglob("*.safetensors"):  # safetensors writes for its owner alone
            with suppress(OSError):  # a mount may refuse it
                shutil.copymode(draft / CONFIG, file)
        (draft / PROVENANCE).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return target


def _save_tensors(tensors: Mapping[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file; an `OSError` where the disk does not take it, as of a full one."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load_drafter(
    directory: Model,
    policy: PolicyLike,
    *,
    min_context: int = 0,
    device: torch.device | str = "cpu",
) -> Eagle3DraftModel:
    """A drafter that fits `policy`, in float32; `refresh_verifier_weights` fills its embedding and head.

    A stand-alone file's embedding and head are loaded. A head that is no copy of the policy's is the drafter's own, as
    is any where `policy` does not name its files. SpecForge's and SafeAILab's layouts are translated; `save_drafter`
    writes what vLLM serves. Its attention is `default_attention(device)`; other arguments are `check_drafter`'s. A
    `DrafterError` for what `check_drafter` refuses, and for numbers that are not finite.
    """
    checked = check_drafter(directory, policy, min_context)
    if checked.method == MTP:
        return load_own_head(directory, policy, device=device)
    config = config_of(checked.config)
    layer = config.transformer_layer_config
    # A drafter of a shorter run serves a longer one, too: vLLM and transformers compute a table of any size.
    layer.max_position_embeddings = max(layer.max_position_embeddings, min_context)
    tensors = _read_checked(checked.tensors)
    if config.draft_vocab_size < layer.vocab_size:
        drafted = _sort_draft_vocab(tensors, layer.vocab_size)
    else:
        drafted = torch.arange(config.draft_vocab_size)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    # What verl-tlt saved says whose its head is. A comparison would mislead: the policy's rows in it may be those of an
    # earlier RL step.
    says_whose_head = "own_head" in checked.config or "verl_tlt" in provenance(directory).get("versions", {})
    policy_files = policy if isinstance(policy, str | os.PathLike) else None
    if "lm_head.weight" in tensors and not says_whose_head:
        head = tensors["lm_head.weight"]
        config.own_head = policy_files is None or is_trained(head, drafted, policy_files, "lm_head")
    model = _filled(config, tensors, default_attention(device)).to(device)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None or has_own_embedding(model) or policy_files is None:
        return model
    if is_trained(embedding, torch.arange(len(embedding)), policy_files, "embed"):
        logger.warning("%s has an embedding of its own, but is served with the policy's: it may draft worse", directory)
    return model


def _sort_draft_vocab(tensors: dict[str, torch.Tensor], vocab: int) -> torch.Tensor:
    """Bring a pruned draft vocabulary into the order of the tokens' ids, and return these, int64 [DV].

    Files may have another order, and need not have `t2d`.
    """
    draft_ids = torch.arange(len(tensors["d2t"]))
    unsorted = draft_ids + tensors["d2t"]
    order = unsorted.argsort()
    tokens = unsorted[order]
    tensors["d2t"] = tokens - draft_ids
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
    tensors["t2d"][tokens] = True
    return tokens


def _read_checked(entries: Mapping[str, Header]) -> dict[str, torch.Tensor]:
    """The tensors of a drafter's files, which are read whole, by speculators' names; all of them finite."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        in_file = read_file(file)
        tensors |= {name: in_file[entry.name] for name, entry in entries.items() if entry.file == file}
        check_finite(tensors, file)
    return tensors


def load_own_head(source: Model, policy: PolicyLike, *, device: torch.device | str = "cpu") -> Eagle3DraftModel:
    """The policy's MTP head as a drafter, in float32: from the policy's own files, or from where one was saved."""
    from verl_tlt.drafter.mtp import mtp_config

    shape = policy_shape(policy)
    head = read_head(source, shape)
    return _filled(mtp_config(shape), head, default_attention(device)).to(device)


def _filled(
    config: Eagle3SpeculatorConfig | MTPSpeculatorConfig, tensors: Mapping[str, torch.Tensor], attention: str
) -> Eagle3DraftModel:
    """The model on the host, with these tensors, whose names and shapes fit."""
    with torch.device("cpu"):
        model = instantiate(config, attention)
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in tensors:
            make_room(model.get_submodule(name))
    model.load_state_dict(tensors, strict=False)
    return model


def load_training_state(directory: str | os.PathLike[str]) -> Fields | None:
    """The `DrafterTrainer.state()` saved with a drafter; None where there is none, or only a pickled one."""
    folder = expanded(directory)
    file = folder / STATE
    if file.is_file():
        return read_state(file)
    pickled = sorted(folder.glob("**/training_state.pt"))
    if pickled:
        logger.warning("%s is pickled and not read: the drafter goes on with a fresh optimizer.", pickled[0])
    return None


def write_state(state: Mapping[str, object], file: Path) -> None:
    """Write nested mappings and lists of tensors and JSON values as safetensors; other values are a `TypeError`.

    Tensors are named by their place; the rest is JSON in the header, where tuples become lists and keys text. A
    `TLTError`, and no file, where the disk does not take it.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = _without_tensors(state, (), tensors)
    try:
        _save_tensors(tensors, file, {_HEADER: json.dumps(values)})
    except OSError as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        raise TLTError(f"{file} could not be written: {error.strerror or error}.") from error


def read_state(file: Path) -> Fields:
    """What `write_state` wrote, on the host; a `DrafterError` where the file is damaged or holds something else."""

    def with_tensor(value: Fields) -> Any:
        names_tensor = value.keys() == {_TENSOR} and isinstance(value[_TENSOR], str)
        return reader.get_tensor(value[_TENSOR]).clone() if names_tensor else value

    try:
        with opened(file) as reader:
            return json.loads((reader.metadata() or {})[_HEADER], object_hook=with_tensor)
    except (KeyError, ValueError, RecursionError) as error:
        raise DrafterError(f"{file} is damaged, or no training state: {error}.") from error


def _without_tensors(value: object, place: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> object:
    """`value` with the name of each tensor in its place; the tensors are put into `tensors` by these names."""
    if isinstance(value, torch.Tensor):
        name = "/".join(place)
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, (*place, str(key)), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
    return value


def provenance(directory: Model) -> Fields:
    """The facts saved with a drafter; empty for a drafter from elsewhere."""
    file = drafter_folder(directory) / PROVENANCE
    return read_json(file) if file.is_file() else {}


def _versions() -> dict[str, str]:
    import verl_tlt

    versions = {"verl_tlt": verl_tlt.__version__}
    for name in ("torch", "transformers", "speculators", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):  # vLLM need not be there to train
            versions[name] = importlib.metadata.version(name)
    return versions
