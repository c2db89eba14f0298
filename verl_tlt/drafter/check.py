"""Does this directory hold a drafter for this policy? Answered from the headers, in milliseconds, without torch.

The doctor asks on the driver before any worker starts; `load_drafter` asks again in the worker. Every mismatch is one
sentence that names the file and the field, because vLLM's own answer to most of them is a shape error deep in a
worker, or silence and an accept length of 1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_tlt.drafter.policy import (
    NUM_AUX,
    DrafterError,
    PolicyLike,
    PolicyShape,
    check_aux_layers,
    policy_shape,
    read_json,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def check_drafter(directory: str | os.PathLike, policy: PolicyLike, min_context: int = 0) -> None:
    """Return when `directory` is a complete EAGLE-3 drafter, in speculators format, that fits `policy`.

    Args:
        directory: the drafter.
        policy: config object, mapping or directory of the policy.
        min_context: longest prompt plus response plus draft it must serve, in tokens.

    Raises:
        DrafterError: the first thing that does not fit.
    """
    path = Path(directory)
    if not path.is_dir():
        raise DrafterError(f"{path} is not a directory: a drafter is a directory with {CONFIG} and {WEIGHTS}.")
    shape = policy_shape(policy)
    layer = _check_config(path / CONFIG, shape, min_context)
    _check_weights(path, layer)


def _check_config(file: Path, policy: PolicyShape, min_context: int) -> dict[str, Any]:
    """The config's fields against the policy; returns the layer's fields plus `draft_vocab_size`."""
    config = read_json(file)
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise DrafterError(f"{file}: speculators_model_type must be 'eagle3', not {kind!r}.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DrafterError(f"{file}: transformer_layer_config must be an object, not {layer!r}.")
    _equal(file, layer, "hidden_size", policy.hidden_size, policy)
    _equal(file, layer, "vocab_size", policy.vocab_size, policy)
    if layer.get("num_hidden_layers") != 1:
        raise DrafterError(
            f"{file}: transformer_layer_config.num_hidden_layers must be 1, not {layer.get('num_hidden_layers')!r}."
        )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    where = f"{file}: eagle_aux_hidden_state_layer_ids"
    if not isinstance(ids, list):
        raise DrafterError(f"{where} must be a list of {NUM_AUX} layers, not {ids!r}.")
    check_aux_layers(ids, policy.num_layers, where)
    context = layer.get("max_position_embeddings")
    if not isinstance(context, int) or context < min_context:
        raise DrafterError(
            f"{file}: transformer_layer_config.max_position_embeddings={context!r} is below {min_context}, the longest "
            f"prompt, response and draft together."
        )
    draft_vocab = config.get("draft_vocab_size")
    if not isinstance(draft_vocab, int) or not 0 < draft_vocab <= policy.vocab_size:
        raise DrafterError(f"{file}: draft_vocab_size must be 1..{policy.vocab_size}, not {draft_vocab!r}.")
    return {**layer, "draft_vocab_size": draft_vocab}


def _equal(file: Path, layer: dict[str, Any], field: str, wanted: int, policy: PolicyShape) -> None:
    if layer.get(field) != wanted:
        raise DrafterError(
            f"{file}: transformer_layer_config.{field}={layer.get(field)!r}, but the policy's is {wanted} "
            f"({policy.source})."
        )


def _check_weights(path: Path, layer: dict[str, Any]) -> None:
    """Names and shapes in the weight file against the config beside it."""
    shapes = _shapes(path)
    file = path / WEIGHTS
    for name, wanted in _wanted(layer, path / CONFIG).items():
        if name not in shapes:
            raise DrafterError(f"{file} has no tensor {name!r}.")
        if shapes[name] != wanted:
            raise DrafterError(f"{file}: {name} is {shapes[name]}, but {CONFIG} asks for {wanted}.")


def _shapes(path: Path) -> dict[str, list[int]]:
    """Tensor shapes by name, from the safetensors header."""
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS
    if not file.is_file():
        pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
        if pickles:
            raise DrafterError(
                f"{path / pickles[0]} is pickled, which can run code when loaded; a drafter's weights are {WEIGHTS}."
            )
        raise DrafterError(f"{file} does not exist.")
    try:
        with safe_open(file, framework="np") as reader:  # shapes only: nothing is read into any framework
            return {name: list(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file} is truncated or not a safetensors file: {error}.") from error


def _wanted(layer: dict[str, Any], file: Path) -> dict[str, list[int]]:
    """Every tensor an EAGLE-3 head of this config has, except those that vLLM may share with the policy."""
    for field in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if not isinstance(layer.get(field), int) or layer[field] < 1:
            raise DrafterError(
                f"{file}: transformer_layer_config.{field} must be a positive integer, not {layer.get(field)!r}."
            )
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
    if layer["draft_vocab_size"] != layer["vocab_size"]:
        wanted |= {
            "lm_head.weight": [layer["draft_vocab_size"], hidden],
            "d2t": [layer["draft_vocab_size"]],
            "t2d": [layer["vocab_size"]],
        }
    return wanted
