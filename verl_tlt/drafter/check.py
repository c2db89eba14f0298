"""Whether a directory holds a drafter for a policy: read from config, headers and index tables, without torch.

Every mismatch is one sentence that names file and field, because vLLM's own answer to most of them is a shape error
deep in a worker, or silence and an accept length of 1.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verl_tlt.drafter.mtp_tensors import head_files, layer_shapes
from verl_tlt.drafter.policy import (
    CONFIG,
    MTP,
    NUM_AUX,
    Fields,
    Model,
    NotHereError,
    PolicyLike,
    folder,
    is_name,
    policy_shape,
    read_json,
)
from verl_tlt.drafter.schema import check_kind, is_other_layout
from verl_tlt.drafter.schema import read_config as read_config
from verl_tlt.drafter.tensor_file import FLOATS, INDEX, WEIGHTS, Header, TensorFile, headers, plain, tensor_files
from verl_tlt.errors import DrafterError
from verl_tlt.files.ownership import SEAL, TRUSTED_MOUNT, expanded, other_owner, sealed

PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer_sha256"
"""Key in `provenance.json`: the vocabulary the drafter was trained for."""
MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64")}
"""Tensors of a pruned draft vocabulary, and their types: [DV] target id less draft id, [V] whether a token is kept."""
_SAVED = {CONFIG, WEIGHTS, PROVENANCE, SEAL, "README.md", "training", "training_state.pt"}
"""Names of all that verl-tlt saves, or has ever saved, with a drafter."""
_NOT_READ = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Prefixes of tensors that a file may hold and nobody needs: copies of the policy's, and computed tables."""
_NOT_READ_ELSEWHERE = ("embed_tokens.", "rotary_emb.")
"""Parts of names of such tensors in other layouts than speculators'; their embedding is the policy's, frozen."""


class CheckedDrafter(NamedTuple):
    """A drafter's files on this disk, which fit its policy."""

    method: str  # as `tlt.drafter.method` says it: "eagle3" or "mtp"
    config: Fields
    """The config.json to stage, of known fields alone; empty for an MTP head, which follows its policy."""
    tensors: dict[str, Header]  # where each tensor is, by speculators' names; an MTP head's by the policy's


def check_drafter(
    directory: Model, policy: PolicyLike, min_context: int = 0, also_owner: int | None = None
) -> CheckedDrafter:
    """Check that `directory` holds a complete drafter that fits `policy`; a `DrafterError` says what does not.

    A drafter is an EAGLE-3 head in the layout of speculators, SpecForge or SafeAILab, or the policy's MTP head.
    `min_context`: longest prompt, response and draft to serve, in tokens; a shorter `max_position_embeddings` is no
    obstacle where the RoPE is computed: `load_drafter` makes it longer. `also_owner`: user id of one more owner to
    trust.
    """
    path = drafter_folder(directory)
    check_owner(path, also_owner)
    shape, config = policy_shape(policy), read_json(path / CONFIG)
    if config.get("speculators_model_type") == MTP:
        drafter = CheckedDrafter(MTP, {}, head_files(path, shape))
    else:
        staged = read_config(path, shape, min_context)
        drafter = CheckedDrafter("eagle3", staged, _check_tensors(path, staged, is_other_layout(config)))
    file = path / PROVENANCE
    if isinstance(policy, str | os.PathLike) and file.is_file():  # equal sizes do not make equal tokens
        trained_for, present = read_json(file).get(TOKENIZER), tokenizer_hash(policy)
        if trained_for and present and trained_for != present:
            raise DrafterError(
                f"{file}: {TOKENIZER}={trained_for}, but the vocabulary of {Path(policy) / 'tokenizer.json'} is "
                f"{present}: this drafter was trained for another tokenizer."
            )
    return drafter


def check_config(path: Path) -> str:
    """`CheckedDrafter.method` of the config in `path`; a `DrafterError` where it is no drafter's, for any policy."""
    file = path / CONFIG
    config = read_json(file)
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", MTP):
        raise DrafterError(f"{file} is no EAGLE-3 drafter: its speculators_model_type is {kind!r}.")
    try:
        if kind is None:
            check_kind(config, file)
    except (KeyError, TypeError, AttributeError) as error:
        raise DrafterError(f"{file} is no EAGLE-3 drafter: {type(error).__name__}, {error}.") from error
    return kind or "eagle3"


def check_owner(drafter: Model, also: int | None = None) -> None:
    """Raise a `DrafterError` where others than this user, root and user `also` can have put a file of the drafter."""
    path = drafter_folder(drafter)

    def reason_in(names: Iterable[str]) -> str | None:
        return next((reason for name in names if (reason := other_owner(path / name, also))), None)

    reason = reason_in((CONFIG, PROVENANCE, WEIGHTS, INDEX))
    if reason is None and os.path.isfile(path / INDEX):
        reason = reason_in(sorted(set(tensor_files(path)[1].values())))
    if reason and not sealed(path):
        raise DrafterError(
            f"{path} may be another user's drafter: {reason}; copy it to a place of your own, or see "
            f"{TRUSTED_MOUNT} in docs/design.md."
        )


def place_for(directory: Model, key: str, replaces: bool = False, others: Iterable[str | None] = ()) -> Path:
    """Where a drafter saved as `directory` will lie; a `DrafterError`, which names `key`, if it would replace anything.

    `replaces`: it may replace an empty directory, or a drafter that verl-tlt saved, if it lies there alone. `others`:
    directories that are written to before.
    """
    path = Path(os.path.realpath(expanded(directory)))
    names = {other for other in others if other and Path(os.path.realpath(other)).is_relative_to(path)}
    if os.path.lexists(path):
        if not replaces:
            raise DrafterError(f"{key} {directory} exists; give another name, or remove it.")
        names |= set(os.listdir(path)) if path.is_dir() and os.access(path, os.R_OK) else {path.name}
    if (mount := os.path.ismount(path)) or (names and not {CONFIG, PROVENANCE} <= names <= _SAVED):
        why = "is a mount" if mount else "holds, or would hold, something other than a drafter that verl-tlt saved"
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


def _check_tensors(directory: Path, config: Fields, other_layout: bool) -> dict[str, Header]:
    """A drafter's tensors by speculators' names; `other_layout`: the files use SafeAILab's or SpecForge's names.

    A `DrafterError` for the first that is missing, unknown, or not as `config` asks for, which is in speculators' form.
    """
    listing, owners = tensor_files(directory)
    names: dict[str, str] = {}  # name in the files, by speculators' name
    for name in owners:
        usual = plain(name) if other_layout else name
        if usual.startswith(_NOT_READ) or (other_layout and any(part in usual for part in _NOT_READ_ELSEWHERE)):
            continue
        if usual in names:
            raise DrafterError(f"{listing}: {name} and {names[usual]} are the same tensor of the drafter.")
        names[usual] = name
    in_files = headers(directory, listing, {name: owners[name] for name in names.values()})
    tensors = {usual: in_files[name] for usual, name in names.items()}
    vocab, hidden = (config["transformer_layer_config"][size] for size in ("vocab_size", "hidden_size"))
    needed = _eagle3_shapes(config)
    optional = {"embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden]}  # copies of the policy's
    if "d2t" in needed:
        optional["t2d"] = [vocab]
    shapes = {name: shape for name, shape in optional.items() if name in tensors} | needed
    for name, shape in shapes.items():
        if name not in tensors:
            raise DrafterError(f"{listing} has no tensor {name!r}.")
        tensors[name].must_be(shape, CONFIG, MAPS.get(name, FLOATS))
    if unknown := sorted(tensors.keys() - shapes.keys() - MAPS.keys()):
        raise DrafterError(f"{listing} holds {unknown[0]}, which the network that {CONFIG} describes does not have.")
    if "d2t" in tensors:
        _check_maps(tensors, config["draft_vocab_size"], vocab)
    return tensors


def _eagle3_shapes(config: Fields) -> dict[str, list[int]]:
    """Shapes of all tensors an EAGLE-3 head of this config has, without those that vLLM may share with the policy."""
    layer = config["transformer_layer_config"]
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    queries, keys = (layer[heads] * layer["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc.weight": [hidden, NUM_AUX * hidden],
        "norm.weight": [hidden],
        "layers.0.hidden_norm.weight": [hidden],
        **layer_shapes("layers.0.", "layers.0.mlp.", hidden, inner, queries, keys, reads=2 * hidden),
    }
    if layer["attention_bias"]:
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        shapes |= {f"layers.0.self_attn.{name}.bias": [width] for name, width in widths.items()}
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": [hidden] for i in range(NUM_AUX)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = [NUM_AUX * hidden]
    draft_vocab, vocab = config["draft_vocab_size"], layer["vocab_size"]
    if draft_vocab != vocab or config.get("own_head"):
        shapes["lm_head.weight"] = [draft_vocab, hidden]
    if draft_vocab != vocab:
        shapes["d2t"] = [draft_vocab]
    return shapes


def _check_maps(tensors: Mapping[str, Header], drafted: int, vocab: int) -> None:
    """Raise a `DrafterError` unless the tokens i + d2t[i] of draft ids i ascend, and t2d, if there, marks the same."""
    file = tensors["d2t"].file
    if tensors["d2t"].shape != [drafted] or tensors["d2t"].kind not in MAPS["d2t"]:
        raise DrafterError(f"{file}: d2t must hold {drafted} whole numbers, as {CONFIG} asks for.")
    offsets = _array(tensors["d2t"]).astype(np.int64)  # [DV]
    ids = np.arange(len(offsets))
    tokens = ids + offsets
    wrong = (offsets < -ids) | (offsets >= vocab - ids)
    wrong[1:] |= np.diff(tokens) <= 0
    if wrong.any():
        i = int(wrong.argmax())
        raise DrafterError(
            f"{file}: d2t[{i}]={int(offsets[i])} makes draft id {i} stand for token {i + int(offsets[i])}; tokens must "
            f"ascend within 0..{vocab - 1}."
        )
    if drafted < vocab and "t2d" in tensors and not np.array_equal(tokens, np.flatnonzero(_array(tensors["t2d"]))):
        file = tensors["t2d"].file
        raise DrafterError(f"{file}: t2d does not mark the {len(tokens)} tokens that d2t names, and no others.")


def _array(header: Header) -> np.ndarray:
    with TensorFile(header.file) as reader:
        return reader.get_array(header.name)


# ------------------------------------------------------------------ digests


def tokenizer_hash(policy: Model) -> str | None:
    """Sixteen hex digits over the vocabulary in tokenizer.json, whatever its layout; None where there is none."""
    try:
        file = folder(policy, ("tokenizer.json",)) / "tokenizer.json"
    except NotHereError:
        return None
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        words = (content.get("model") or {}).get("vocab") or {}
        pairs = list(words.items()) if isinstance(words, dict) else [(word, i) for i, (word, *_) in enumerate(words)]
        pairs += [(token["content"], token["id"]) for token in content.get("added_tokens") or ()]
        text = json.dumps(sorted(set(pairs)), ensure_ascii=True)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DrafterError(f"{file} is no tokenizer: {error!r}.") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def files_digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits over the content of files, for provenance: which data a drafter was trained on."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]
