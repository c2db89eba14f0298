"""Whether a directory holds a drafter for a policy: read from config, headers and index tables, without torch.

Every mismatch is one sentence that names file and field, because vLLM's own answer to most of them is a shape error
deep in a worker, or silence and an accept length of 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from verl_tlt.drafter.mtp_tensors import head_files
from verl_tlt.drafter.other_layouts import check_kind, is_other_layout, to_speculators_config
from verl_tlt.drafter.policy import (
    COMPUTED_ROPE,
    CONFIG,
    INDEX,
    LONGEST_DRAFT,
    MTP,
    WEIGHTS,
    DrafterError,
    Fields,
    Header,
    Model,
    NotHereError,
    PolicyLike,
    PolicyShape,
    check_aux_layers,
    folder,
    is_name,
    policy_shape,
    read_json,
    tensor_files,
)
from verl_tlt.drafter.schema import Layer, as_served, check_rows, checked
from verl_tlt.drafter.tensors import check_tensors
from verl_tlt.files.ownership import TRUSTED_MOUNT, other_owner, sealed

PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer_sha256"
"""Key in `provenance.json`: the vocabulary the drafter was trained for."""


def check_drafter(directory: Model, policy: PolicyLike, min_context: int = 0, also_owner: int | None = None) -> None:
    """Return when `directory` is a complete drafter that fits `policy`: an EAGLE-3 head, or the policy's MTP head.

    Args:
        directory: a folder or a name on the hub, in the layout of speculators, SpecForge or SafeAILab.
        policy: its directory, name on the hub, `transformers` config, a mapping of its fields, or a `PolicyShape`.
        min_context: longest prompt plus response plus draft it must serve, in tokens. A shorter
            `max_position_embeddings` is no obstacle where the RoPE is computed: `load_drafter` makes it longer.
        also_owner: user id of one more owner to trust (`check_owner`).

    Raises:
        DrafterError: the first thing that does not fit.
    """
    locate_drafter(directory, policy, min_context, also_owner)


def locate_drafter(directory: Model, policy: PolicyLike, min_context: int, also_owner: int | None) -> dict[str, Header]:
    """Where the tensors of a drafter are, by speculators' names, when it passes `check_drafter`."""
    path = drafter_folder(directory)
    check_owner(path, also_owner)
    shape = policy_shape(policy)
    if drafter_method(path) == MTP:
        found = head_files(path, shape)
    else:
        config = read_config(path, shape, min_context)
        found = check_tensors(path, config, others=is_other_layout(read_json(path / CONFIG)))
    _check_tokenizer(path, policy)
    return found


def drafter_method(path: Path) -> str:
    """What the drafter in a folder is, as `tlt.drafter.method` says it."""
    return MTP if read_json(path / CONFIG).get("speculators_model_type") == MTP else "eagle3"


def check_config(path: Path) -> None:
    """Raise a `DrafterError` where the config in `path` is no drafter's, whatever policy it may be for."""
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


def check_owner(drafter: Model, also: int | None = None) -> None:
    """Raise a `DrafterError` where others than this user, root and user `also` can have put a file of the drafter."""
    path = drafter_folder(drafter)
    names = [CONFIG, PROVENANCE, WEIGHTS, INDEX]
    if (reason := _other(path, names, also)) is None and (path / INDEX).is_file():
        reason = _other(path, sorted(set(tensor_files(path)[1].values())), also)
    if reason and not sealed(path):
        raise DrafterError(
            f"{path} may be another user's drafter: {reason}; copy it to a place of your own, or see "
            f"{TRUSTED_MOUNT} in docs/design.md."
        )


def _other(path: Path, names: Iterable[str], also: int | None) -> str | None:
    return next((reason for name in names if (reason := other_owner(path / name, also))), None)


def drafter_folder(drafter: Model) -> Path:
    """The folder on this disk of a drafter, whose files are fetched where it is a name on the hub."""
    path = folder(drafter, (WEIGHTS, INDEX), besides=(CONFIG, PROVENANCE))
    if not path.is_dir():
        raise DrafterError(f"{path} is not a directory: a drafter is a directory with {CONFIG} and {WEIGHTS}.")
    if is_name(drafter) and not (path / WEIGHTS).is_file():
        for file in sorted(set(tensor_files(path)[1].values())):
            folder(drafter, (file,))
    return path


def read_config(path: Path, policy: PolicyShape, min_context: int = 0) -> Fields:
    """The drafter's config as it is staged, in speculators' form: checked, and of known fields alone (`DrafterError`).

    `max_position_embeddings` is at most what an engine of this policy needs: vLLM computes a table of so many rows.
    """
    file = path / CONFIG
    config, layer_at = read_json(file), "transformer_layer_config."
    if is_other_layout(config):
        config, layer_at = to_speculators_config(config, policy, file), ""
    drafter, prefix = checked(config, str(file), layer_at), f"{file}: {layer_at}"
    layer, hidden = drafter.transformer_layer_config, drafter.target_hidden_size
    for field, found, wanted in (
        ("hidden_size", layer.hidden_size, policy.hidden_size),
        ("vocab_size", layer.vocab_size, policy.vocab_size),
        ("target_hidden_size", hidden or policy.hidden_size, policy.hidden_size),
    ):
        if found != wanted:
            raise DrafterError(f"{prefix}{field}={found}, but the policy's is {wanted} ({policy.source}).")
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    if heads % kv_heads:
        raise DrafterError(f"{prefix}num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    where = f"{file}: eagle_aux_hidden_state_layer_ids"
    check_aux_layers(drafter.eagle_aux_hidden_state_layer_ids, policy.num_layers, where)
    if drafter.draft_vocab_size > policy.vocab_size:
        raise DrafterError(f"{file}: draft_vocab_size must be 1..{policy.vocab_size}, not {drafter.draft_vocab_size}.")
    context = _positions(layer, policy, min_context, prefix)
    served = as_served(drafter, policy)
    served["transformer_layer_config"]["max_position_embeddings"] = context
    return served


def _positions(layer: Layer, policy: PolicyShape, min_context: int, prefix: str) -> int:
    """`max_position_embeddings` of the drafter that is served."""
    context, rope = layer.max_position_embeddings, layer.rope_parameters.rope_type
    needed = max(min_context, policy.max_position_embeddings + LONGEST_DRAFT)
    if rope in COMPUTED_ROPE:
        layer = layer.model_copy(update={"max_position_embeddings": (context := min(context, needed))})
    elif context < min_context:
        raise DrafterError(
            f"{prefix}max_position_embeddings={context} is below {min_context}, the longest prompt, response and draft "
            f"together, and positions of RoPE type {rope!r} cannot be continued."
        )
    check_rows(layer, policy, needed, prefix)
    return context


def _check_tokenizer(path: Path, policy: PolicyLike) -> None:
    """Compare vocabularies where both sides say theirs: equal sizes do not make equal tokens."""
    file = path / PROVENANCE
    if not isinstance(policy, str | os.PathLike) or not file.is_file():
        return
    trained_for, present = read_json(file).get(TOKENIZER), tokenizer_hash(policy)
    if trained_for and present and trained_for != present:
        raise DrafterError(
            f"{file}: {TOKENIZER}={trained_for}, but the vocabulary of {Path(policy) / 'tokenizer.json'} is {present}: "
            "this drafter was trained for another tokenizer."
        )


def tokenizer_hash(policy: Model) -> str | None:
    """Sixteen hex digits over the tokenizer's vocabulary, tokens with their ids; None where there is no tokenizer.json.

    Of what the file says, not of its bytes: saving a tokenizer again with another release changes its layout.
    """
    try:
        file = folder(policy, ("tokenizer.json",)) / "tokenizer.json"
    except NotHereError:
        return None
    if not file.is_file():
        return None
    try:
        text = _words(read_json(file))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, DrafterError):
            raise
        raise DrafterError(f"{file} is no tokenizer: {error!r}.") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(content: Fields) -> str:
    """All tokens of a tokenizer with their ids, as one text."""
    words = (content.get("model") or {}).get("vocab") or {}
    pairs = list(words.items()) if isinstance(words, dict) else [(word, i) for i, (word, *_) in enumerate(words)]
    pairs += [(token["content"], token["id"]) for token in content.get("added_tokens") or ()]
    return json.dumps(sorted(set(pairs)), ensure_ascii=True)


def files_digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits over the content of files, for provenance: which data a drafter was trained on."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]
