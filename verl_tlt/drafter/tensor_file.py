"""Finds the file of each tensor of a model, and reads safetensors files.

A drafter's file is read whole into memory and not mapped: the kernel ends a process (SIGBUS) that reads a mapped page
of a file which has become shorter, and engines read the file while the trainer replaces it.

A drafter's tensors have a name in each layout:

speculators, and our files    layers.0.self_attn.q_proj.weight
SafeAILab/EAGLE, SpecForge    midlayer.self_attn.q_proj.weight
vLLM, live                    model.layers.0.self_attn.qkv_proj.weight: q, k and v stacked, as are gate and up
MTP head, in a checkpoint     mtp.layers.0.* (Qwen3.5), model.mtp_layers.0.* (MiMo; live behind the policy's L layers,
                              the decoder layer as model.mtp_layers.L.mtp_block.*)
its experts                   *.experts.gate_up_proj and down_proj; live *.experts.routed_experts.w13_weight, w2_weight
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_tlt.drafter.model_files import Model, folder, is_name
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG
from verl_tlt.files.json_files import read_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLOATS = ("F32", "F16", "BF16")
"""Types of a drafter's weights."""
_LFS = b"version https://git-lfs"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_MIMO = re.compile(r"^mtp_layers\.\d+\.(?:mtp_block\.)?")
_STACKED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_EXPERTS = {
    "experts.routed_experts.": "experts.",
    "experts.gate_up_proj": "experts.w13_weight",
    "experts.down_proj": "experts.w2_weight",
}
"""Parts of names that vLLM spells differently; some releases have no `routed_experts`."""


class Header(NamedTuple):
    """What the header of a safetensors file says of one tensor."""

    file: Path
    name: str
    shape: list[int]
    kind: str  # its dtype, such as "BF16"

    def must_be(self, shape: list[int], config: str, kinds: Sequence[str] = ()) -> None:
        """Raise a `DrafterError` where the shape is not what `config` asks for, or the dtype is none of `kinds`."""
        if self.shape != shape:
            raise DrafterError(f"{self.file}: {self.name} is {self.shape}, but {config} asks for {shape}.")
        if kinds and self.kind not in kinds:
            raise DrafterError(f"{self.file}: {self.name} holds {self.kind}, but must hold {' or '.join(kinds)}.")


@contextmanager
def opened(file: Path, framework: str = "pt") -> Iterator[Any]:
    """`safetensors.safe_open`, for headers and for parts of a large file; a `DrafterError` for a file that is broken.

    It maps the file: clone a tensor that is kept.
    """
    from safetensors import SafetensorError, safe_open

    try:
        file.open("rb").close()  # safetensors does not tell a file without permission from one that is broken
        with safe_open(file, framework) as reader:
            yield reader
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def read_headers(file: Path) -> dict[str, Header]:
    """The header of each tensor in a file, by name."""
    with opened(file, "np") as reader:
        parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
        return {name: Header(file, name, list(s.get_shape()), s.get_dtype()) for name, s in parts.items()}


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, in memory of their own; a `DrafterError` where it is not a whole safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(file.read_bytes())
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors does not know
        raise _unreadable(file, error) from error


def read_parts(entries: Mapping[str, Header]) -> dict[str, torch.Tensor]:
    """The tensors of these headers, out of files that may be much larger."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as reader:
            for name, entry in entries.items():
                if entry.file == file:
                    tensors[name] = reader.get_tensor(entry.name).clone()
    return tensors


def _unreadable(file: Path, error: Exception) -> DrafterError:
    if isinstance(error, FileNotFoundError):
        return DrafterError(f"{file} {_missing(file)}.")
    if isinstance(error, OSError):
        return DrafterError(f"{file} cannot be read: {error.strerror or error}.")
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            return DrafterError(f"{file} is a pointer of Git LFS: run `git lfs pull` in its folder.")
    return DrafterError(f"{file} is not a complete safetensors file: {error}.")


def check_finite(tensors: Mapping[str, torch.Tensor], where: str | os.PathLike[str]) -> None:
    """Raise a `DrafterError` where a tensor holds NaN or infinity."""
    broken = not_finite(tensors)
    if broken is not None:
        raise DrafterError(f"{where}: {broken} holds NaN or infinity.")


def not_finite(tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> str | None:
    """Name of the first tensor with NaN or infinity, sought on `device` or where it is; None: all are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.to(device).isfinite().all():
            return name
    return None


def plain(name: str) -> str:
    """A tensor's name in speculators' layout; what vLLM stacked stays so, and an MTP head has no prefix."""
    name = _MIMO.sub("mtp_layers.0.", name.removeprefix("model.").removeprefix("mtp."))
    return name.replace("midlayer.", "layers.0.")


def stacked(name: str) -> str:
    """The plain name of vLLM's tensor that holds this one; the same for all tensors that vLLM stacks in it."""
    name = plain(name).replace("draft_id_to_target_id", "d2t")
    for pattern, stack in _STACKED:
        name = pattern.sub(stack, name)
    for part, live in _EXPERTS.items():
        name = name.replace(part, live)
    return name


def tensor_files(model: Model, fetch: bool = True) -> tuple[Path, dict[str, str]]:
    """(the file that lists a model's tensors, the file of each by the tensor's name); else a `DrafterError`.

    As in transformers a single file comes before an index, whose other files count only if it names that file, too.
    """
    directory = folder(model, (WEIGHTS, INDEX), fetch=fetch)
    single = directory / WEIGHTS
    index = directory / INDEX
    owners = _index(index) if index.is_file() else {}
    if single.is_file():
        in_single = dict.fromkeys(read_headers(single), WEIGHTS)
        if WEIGHTS in owners.values():
            return index, owners | in_single
        return single, in_single
    if owners:
        return index, owners
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise DrafterError(
            f"{directory / pickles[0]} is pickled, which can run code when it is read; if you trust it, write "
            f"{WEIGHTS} beside it, with save_file of safetensors.torch or save_pretrained of transformers."
        )
    for file in (single, index):
        if file.is_symlink():
            raise DrafterError(f"{file} {_missing(file)}.")
    raise DrafterError(f"{directory} holds no weights: there is neither {WEIGHTS} nor {INDEX}.")


def check_weights(model: Model) -> None:
    """Raise a `DrafterError` where a model's folder lacks weights: all of them, a shard, or what a link leads to.

    Of a model that is named on the hub nothing is checked: its files are fetched.
    """
    if is_name(model):
        return
    directory = folder(model, ())
    try:
        listing, owners = tensor_files(model)
    except DrafterError as error:
        if "holds no weights" in str(error) and directory.name == "huggingface" and (directory / CONFIG).is_file():
            merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {directory.parent} --target_dir OUT"
            raise DrafterError(f"{str(error).rstrip('.')}; write them with {merge}.") from error
        raise
    for file in sorted(set(owners.values())):
        if not (directory / file).is_file():
            raise DrafterError(f"{directory / file} {_missing(directory / file)}, and {listing} names it.")


def _missing(file: Path) -> str:
    """Why a path is no file, as the end of a sentence."""
    if file.is_dir():
        return "is a folder"
    return f"is a link to {os.readlink(file)}, which does not exist" if file.is_symlink() else "does not exist"


def _index(file: Path) -> dict[str, str]:
    table = read_json(file).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(owner, str) for owner in table.values()):
        raise DrafterError(f"{file}: weight_map must say which file each tensor is in, not {str(table)[:80]}.")
    return table


def headers(model: Model, listing: Path, owners: Mapping[str, str], fetch: bool = True) -> dict[str, Header]:
    """Headers of these tensors of a model by name; `owners`: the file of each by its name, as `listing` says."""
    entries = {}
    for file in sorted(set(owners.values())):
        path = folder(model, (file,), fetch=fetch) / file
        found = read_headers(path)
        for name in [name for name, owner in owners.items() if owner == file]:
            if name not in found:
                raise DrafterError(f"{path} has no tensor {name!r}, which {listing} says it has.")
            entries[name] = found[name]
    return entries
