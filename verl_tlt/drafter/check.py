"""Whether a directory holds a drafter for a policy: read from its config, the headers of its files, and index tables.

Every mismatch is one sentence that names file and field, because vLLM's own answer to most of them is a shape error
deep in a worker, or silence and an accept length of 1.
"""

import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_tlt.drafter.head_config import LAYER, check_kind, config_of, is_flat, read_config
from verl_tlt.drafter.model_files import Model, NotHereError, first_line, folder, is_name
from verl_tlt.drafter.mtp_tensors import head_files
from verl_tlt.drafter.policy import MTP, Fields, PolicyLike, policy_shape
from verl_tlt.drafter.tensor_file import FLOATS, INDEX, WEIGHTS, Header, headers, opened, plain, tensor_files
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG, expanded
from verl_tlt.files.json_files import read_json

logger = logging.getLogger(__name__)

PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer"
"""Key in `provenance.json`: the vocabulary that the drafter was trained for (`tokenizer_facts`)."""
MAPS = {"d2t": ("I64", "I32")}
"""The tensor of a pruned draft vocabulary, and its types: [DV] target id less draft id."""
_SAVED = {CONFIG, WEIGHTS, PROVENANCE, "seal", "README.md", "training", "training_state.pt"}
"""Names of all that verl-tlt saves, or has ever saved, with a drafter."""
_NOT_READ = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "t2d")
"""Prefixes of tensors that a file may hold and nobody needs: copies of the policy's, computed tables, and the map that
follows from `d2t`."""
_NOT_READ_FLAT = ("embed_tokens.", "rotary_emb.")
"""Parts of names of such tensors in a flat layout; the embedding is the policy's, unless that has another width."""


class CheckedDrafter(NamedTuple):
    """A drafter's files on this disk, which fit its policy."""

    method: str  # as `tlt.drafter.method` says it: "eagle3" or "mtp"
    config: Fields
    """The config.json to stage, of known fields alone; empty for an MTP head, which follows its policy."""
    tensors: dict[str, Header]  # where each tensor is, by speculators' names; an MTP head's by the policy's


def check_drafter(directory: Model, policy: PolicyLike, min_context: int = 0) -> CheckedDrafter:
    """Check that `directory` holds a complete drafter that fits `policy`; a `DrafterError` says what does not.

    A drafter is an EAGLE-3 head in the layout of speculators, SpecForge or SafeAILab, or the policy's MTP head.
    `min_context`: longest prompt, response and draft to serve, in tokens; a shorter `max_position_embeddings` is no
    obstacle where the RoPE is computed: `load_drafter` makes it longer.
    """
    path = drafter_folder(directory)
    shape = policy_shape(policy)
    config = read_json(path / CONFIG)
    if config.get("speculators_model_type") == MTP:
        drafter = CheckedDrafter(MTP, {}, head_files(path, shape))
    else:
        check_config(path)
        drafter = _check_eagle3(path, read_config(path, shape, min_context), is_flat(config))
    if isinstance(policy, str | os.PathLike) and (path / PROVENANCE).is_file():  # equal sizes do not make equal tokens
        _check_tokenizer(path / PROVENANCE, policy)
    return drafter


def check_config(path: Path) -> str:
    """`CheckedDrafter.method` of the config in `path`; a `DrafterError` where it is no drafter's, for any policy."""
    file = path / CONFIG
    config = read_json(file)
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", MTP):
        raise DrafterError(f"{file} is no EAGLE-3 drafter: its speculators_model_type is {kind!r}.")
    if kind is None:
        check_kind(config, file)
    return kind or "eagle3"


def place_for(directory: Model, key: str, replaces: bool = False, others: Iterable[str | None] = ()) -> Path:
    """Where a drafter saved as `directory` will lie; a `DrafterError`, which names `key`, if it would replace anything.

    `replaces`: it may replace an empty directory, or a drafter that verl-tlt saved, if it lies there alone. `others`:
    directories that the run writes to before it saves the drafter.
    """
    path = Path(os.path.realpath(expanded(directory)))
    # What will be there when the drafter is saved.
    names = {other for other in others if other and Path(os.path.realpath(other)).is_relative_to(path)}
    if os.path.lexists(path):
        if not replaces:
            raise DrafterError(f"{key} {directory} exists; give another name, or remove it.")
        readable = path.is_dir() and os.access(path, os.R_OK)
        names |= set(os.listdir(path)) if readable else {path.name}
    is_saved_drafter = {CONFIG, PROVENANCE} <= names <= _SAVED
    why = None
    if os.path.ismount(path):
        why = "is a mount"
    elif names and not is_saved_drafter:
        why = "holds, or would hold, something other than a drafter that verl-tlt saved"
    if why is not None:
        raise DrafterError(f"{key}={directory} {why}, and a drafter replaces it whole: name a directory of its own.")
    return path


def drafter_folder(drafter: Model) -> Path:
    """The folder on this disk of a drafter; the files of a drafter named on the hub are fetched."""
    path = folder(drafter, (WEIGHTS, INDEX), besides=(CONFIG, PROVENANCE))
    if not os.path.isdir(path):
        raise DrafterError(f"{path} is not a directory: a drafter is a directory with {CONFIG} and {WEIGHTS}.")
    if is_name(drafter) and not (path / CONFIG).is_file():
        raise NotHereError(f"{drafter}: {CONFIG} is not in the local cache, and could not be fetched.")
    if is_name(drafter) and not (path / WEIGHTS).is_file():
        for file in sorted(set(tensor_files(path)[1].values())):
            folder(drafter, (file,))
    return path


# ------------------------------------------------------------------ its tensors


def _check_eagle3(directory: Path, config: Fields, flat: bool) -> CheckedDrafter:
    """An EAGLE-3 head whose tensors are those of the network of `config`, which is in speculators' form.

    `flat`: the files use SafeAILab's or SpecForge's names. A `DrafterError` for the first tensor that is missing,
    unknown, or of another shape or type.
    """
    listing, owners = tensor_files(directory)
    # A head of another width than the policy's can share neither of these with it.
    needed = ("embed_tokens.weight", "lm_head.weight") if "target_hidden_size" in config else ()
    names = _names_in_files(listing, owners, flat, needed)
    in_files = headers(directory, listing, {name: owners[name] for name in names.values()})
    tensors = {usual: in_files[name] for usual, name in names.items()}
    shapes = _shapes(config, directory / CONFIG)
    drafted = config["draft_vocab_size"]
    vocab = config[LAYER]["vocab_size"]
    optional = {"embed_tokens.weight"}
    if drafted == vocab and not config.get("own_head"):
        optional.add("lm_head.weight")  # the policy's is used
    for name, shape in shapes.items():
        if name in tensors:
            tensors[name].must_be(shape, CONFIG, MAPS.get(name, FLOATS))
        elif name in needed:
            raise DrafterError(
                f"{listing} has no tensor {name!r}, and the policy's does not fit a head of another width: take a head "
                "whose files have one, or make a head of the policy's width with verl-tlt warmup."
            )
        elif name not in optional:
            raise DrafterError(f"{listing} has no tensor {name!r}.")
    unknown = sorted(tensors.keys() - shapes.keys() - MAPS.keys())
    if unknown:
        raise DrafterError(f"{listing} holds {unknown[0]}, which the network that {CONFIG} describes does not have.")
    if "d2t" in tensors:
        _check_maps(tensors, drafted, vocab)
    return CheckedDrafter("eagle3", config, tensors)


def _names_in_files(listing: Path, owners: Iterable[str], flat: bool, needed: Collection[str]) -> dict[str, str]:
    """The name in the files of each tensor that is read, by speculators' name.

    `owners`: all names in the files, which `listing` lists. Tensors of `needed` are read in any case.
    """
    names: dict[str, str] = {}
    for name in owners:
        usual = plain(name) if flat else name
        not_read = usual.startswith(_NOT_READ) or (flat and any(part in usual for part in _NOT_READ_FLAT))
        if not_read and usual not in needed:
            continue
        if usual in names:
            raise DrafterError(f"{listing}: {name} and {names[usual]} are the same tensor of the drafter.")
        names[usual] = name
    return names


def _shapes(config: Fields, file: Path) -> dict[str, list[int]]:
    """Shapes of the network's tensors by name, from speculators' own model, which is built without memory."""
    import torch

    from verl_tlt.drafter.build import instantiate

    try:
        with torch.device("meta"):
            state: Mapping[str, Any] = instantiate(config_of(config), "eager").state_dict()
    except Exception as error:  # whatever transformers or torch raise for sizes that do not fit together
        raise DrafterError(f"{file} describes no drafter that can be built: {first_line(error)}.") from error
    return {name: list(tensor.shape) for name, tensor in state.items() if not name.startswith(_NOT_READ)}


def _check_maps(tensors: Mapping[str, Header], drafted: int, vocab: int) -> None:
    """Raise a `DrafterError` unless the tokens i + d2t[i] of draft ids i differ, and are the policy's."""
    file = tensors["d2t"].file
    tensors["d2t"].must_be([drafted], CONFIG, MAPS["d2t"])
    offsets = _array(tensors["d2t"]).astype(np.int64)  # [DV]
    tokens = np.sort(np.arange(drafted) + offsets)  # ModelOpt's are in the order of their frequency
    if tokens.min() < 0 or tokens.max() >= vocab or (np.diff(tokens) == 0).any():
        raise DrafterError(f"{file}: the tokens i + d2t[i] must be distinct and within 0..{vocab - 1}.")
    if drafted == vocab and offsets.any():
        raise DrafterError(f"{file}: d2t must be zero, since the draft vocabulary is the policy's whole one.")


def _array(header: Header) -> np.ndarray:
    with opened(header.file, "np") as reader:
        return np.array(reader.get_tensor(header.name))


# ------------------------------------------------------------------ digests


def tokenizer_facts(policy: Model) -> Fields | None:
    """What is noted of the vocabulary in tokenizer.json: how many tokens, and a digest in the order of their ids."""
    tokens = _tokens(policy)
    return {"tokens": len(tokens), "sha256": _digest(tokens)} if tokens else None


def _check_tokenizer(file: Path, policy: Model) -> None:
    """Raise a `DrafterError` where a token that drafter and policy share has another text to each.

    A policy may have more tokens than the drafter was trained for, which are compared up to the drafter's last one.
    """
    known = read_json(file).get(TOKENIZER)
    if not isinstance(known, dict):
        return
    tokens = _tokens(policy)
    if tokens is None:
        return
    count = known.get("tokens", 0)
    if len(tokens) < count:
        logger.warning("%s: the policy's tokenizer has fewer tokens than the drafter's, and was not compared.", file)
    elif _digest(tokens[:count]) != known.get("sha256"):
        raise DrafterError(
            f"{file}: this drafter was trained for another tokenizer than that of {Path(policy) / 'tokenizer.json'}."
        )


def _tokens(policy: Model) -> list[tuple[int, str]] | None:
    """(id, text) of all tokens of a policy by id; None where it has no tokenizer.json."""
    try:
        file = folder(policy, ("tokenizer.json",)) / "tokenizer.json"
    except NotHereError:
        return None
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        words = (content.get("model") or {}).get("vocab") or {}
        if isinstance(words, dict):
            pairs = {(number, word) for word, number in words.items()}
        else:  # of a Unigram model: [word, score], in the order of their ids
            pairs = {(number, word) for number, (word, *_) in enumerate(words)}
        pairs |= {(token["id"], token["content"]) for token in content.get("added_tokens") or ()}
        return sorted(pairs)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DrafterError(f"{file} is no tokenizer: {error!r}.") from error


def _digest(tokens: list[tuple[int, str]]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def files_digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits over the content of files, for provenance: which data a drafter was trained on."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]
