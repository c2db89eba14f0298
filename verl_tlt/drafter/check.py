"""Whether a directory holds a drafter for a policy: read from the files' headers, in milliseconds, without torch.

Every mismatch is one sentence that names file and field, because vLLM's own answer to most of them is a shape error
deep in a worker, or silence and an accept length of 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from verl_tlt.drafter.other_layouts import is_other_layout, speculators_name, to_speculators_config
from verl_tlt.drafter.policy import (
    COMPUTED_ROPE,
    CONFIG,
    NUM_AUX,
    DrafterError,
    Fields,
    Model,
    NotHereError,
    PolicyLike,
    PolicyShape,
    check_aux_layers,
    folder,
    open_tensors,
    policy_shape,
    read_json,
    rope_of,
)
from verl_tlt.ownership import other_owner

WEIGHTS = "model.safetensors"
PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer_sha256"
"""Key in `provenance.json`: the vocabulary the drafter was trained for."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def check_drafter(directory: Model, policy: PolicyLike, min_context: int = 0) -> None:
    """Return when `directory` is a complete EAGLE-3 drafter that fits `policy`.

    Args:
        directory: a folder or a name on the hub, in the layout of speculators, SpecForge or SafeAILab.
        policy: its directory, name on the hub, `transformers` config, a mapping of its fields, or a `PolicyShape`.
        min_context: longest prompt plus response plus draft it must serve, in tokens. A shorter
            `max_position_embeddings` is no obstacle where the RoPE is computed: `load_drafter` makes it longer.

    Raises:
        DrafterError: the first thing that does not fit.
    """
    path = drafter_folder(directory)
    config = read_config(path, policy_shape(policy), min_context)
    _check_tokenizer(path, policy)
    shapes = _shapes(path)
    if is_other_layout(read_json(path / CONFIG)):
        shapes = {speculators_name(name) or name: shape for name, shape in shapes.items()}
    for name, wanted in _wanted(config).items():
        if name not in shapes:
            raise DrafterError(f"{path / WEIGHTS} has no tensor {name!r}.")
        if shapes[name] != wanted:
            raise DrafterError(f"{path / WEIGHTS}: {name} is {shapes[name]}, but {CONFIG} asks for {wanted}.")


def check_owner(drafter: Model) -> None:
    """Raise a `DrafterError` where another user than this one and root can have put the drafter's files."""
    path = drafter_folder(drafter)
    for name in (CONFIG, WEIGHTS, PROVENANCE):
        if reason := other_owner(path / name):
            raise DrafterError(f"{path} may be another user's drafter: {reason}; copy it to a place of your own.")


def drafter_folder(drafter: Model) -> Path:
    """The folder on this disk of a drafter, whose files are fetched where it is a name on the hub."""
    path = folder(drafter, (WEIGHTS,), besides=(CONFIG, PROVENANCE))
    if not path.is_dir():
        raise DrafterError(f"{path} is not a directory: a drafter is a directory with {CONFIG} and {WEIGHTS}.")
    return path


def read_config(path: Path, policy: PolicyShape, min_context: int = 0) -> Fields:
    """The drafter's config in speculators' form, its fields compared with the policy's (`DrafterError`)."""
    file = path / CONFIG
    config, prefix = read_json(file), f"{file}: transformer_layer_config."
    if is_other_layout(config):
        config, prefix = to_speculators_config(config, policy, file), f"{file}: "
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind != "eagle3":
        raise DrafterError(f"{file}: speculators_model_type must be 'eagle3', not {kind!r}.")
    if not isinstance(layer, dict):
        raise DrafterError(f"{file}: transformer_layer_config must be an object, not {layer!r}.")
    _check_layer(layer, policy, prefix)
    ids, where = config.get("eagle_aux_hidden_state_layer_ids"), f"{file}: eagle_aux_hidden_state_layer_ids"
    if not isinstance(ids, list):
        raise DrafterError(f"{where} must be a list of {NUM_AUX} layers, not {ids!r}.")
    check_aux_layers(ids, policy.num_layers, where)
    context, rope = layer["max_position_embeddings"], rope_of(layer)["rope_type"]
    if context < min_context and rope not in COMPUTED_ROPE:
        raise DrafterError(
            f"{prefix}max_position_embeddings={context} is below {min_context}, the longest prompt, response and draft "
            f"together, and positions of RoPE type {rope!r} cannot be continued."
        )
    draft_vocab = config.get("draft_vocab_size")
    if not isinstance(draft_vocab, int) or not 0 < draft_vocab <= policy.vocab_size:
        raise DrafterError(f"{file}: draft_vocab_size must be 1..{policy.vocab_size}, not {draft_vocab!r}.")
    return config


def _check_layer(layer: Fields, policy: PolicyShape, prefix: str) -> None:
    for field, wanted in (("hidden_size", policy.hidden_size), ("vocab_size", policy.vocab_size)):
        if layer.get(field) != wanted:
            raise DrafterError(f"{prefix}{field}={layer.get(field)!r}, but the policy's is {wanted} ({policy.source}).")
    if layer.get("num_hidden_layers") != 1:
        raise DrafterError(f"{prefix}num_hidden_layers must be 1, not {layer.get('num_hidden_layers')!r}.")
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    for field in ("intermediate_size", heads, kv_heads, "head_dim", "max_position_embeddings"):
        if not isinstance(layer.get(field), int) or layer[field] < 1:
            raise DrafterError(f"{prefix}{field} must be a positive integer, not {layer.get(field)!r}.")
    if layer[heads] % layer[kv_heads]:
        raise DrafterError(f"{prefix}{heads}={layer[heads]} must be a multiple of {kv_heads}={layer[kv_heads]}.")


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


def _shapes(path: Path) -> dict[str, list[int]]:
    """Tensor shapes by name, from the safetensors header."""
    file = path / WEIGHTS
    pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
    if pickles and not file.is_file():
        raise DrafterError(
            f"{path / pickles[0]} is pickled, which can run code when it is read; if you trust it, write {WEIGHTS} "
            "beside it: safetensors.torch.save_file(torch.load(THAT_FILE, weights_only=True), NEW_FILE)."
        )
    with open_tensors(file, "np") as reader:
        return {name: list(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118


def _wanted(config: Fields) -> dict[str, list[int]]:
    """Every tensor an EAGLE-3 head of this config has, except those that vLLM may share with the policy."""
    layer = config["transformer_layer_config"]
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    block, attention, mlp = "layers.0.", "layers.0.self_attn.", "layers.0.mlp."
    wanted = {
        "fc.weight": [hidden, NUM_AUX * hidden],
        "norm.weight": [hidden],
        f"{block}input_layernorm.weight": [hidden],
        f"{block}hidden_norm.weight": [hidden],
        f"{block}post_attention_layernorm.weight": [hidden],
        f"{attention}q_proj.weight": [queries, 2 * hidden],
        f"{attention}k_proj.weight": [keys, 2 * hidden],
        f"{attention}v_proj.weight": [keys, 2 * hidden],
        f"{attention}o_proj.weight": [hidden, queries],
        f"{mlp}gate_proj.weight": [inner, hidden],
        f"{mlp}up_proj.weight": [inner, hidden],
        f"{mlp}down_proj.weight": [hidden, inner],
    }
    if config.get("fc_norm"):
        wanted |= {f"fc_norm.{i}.weight": [hidden] for i in range(NUM_AUX)}
    if config.get("norm_before_fc"):
        wanted["input_norm.weight"] = [NUM_AUX * hidden]
    draft_vocab, vocab = config["draft_vocab_size"], layer["vocab_size"]
    if draft_vocab != vocab or config.get("own_head"):
        wanted["lm_head.weight"] = [draft_vocab, hidden]
    if draft_vocab != vocab:
        wanted |= {"d2t": [draft_vocab], "t2d": [vocab]}
    return wanted


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
    content = read_json(file)
    words = (content.get("model") or {}).get("vocab") or {}
    pairs = list(words.items()) if isinstance(words, dict) else [(word, i) for i, (word, *_) in enumerate(words)]
    pairs += [(token["content"], token["id"]) for token in content.get("added_tokens") or ()]
    text = json.dumps(sorted(set(pairs)), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def files_digest(files: Iterable[Path]) -> str:
    """Sixteen hex digits over the content of files, for provenance: which data a drafter was trained on."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]
