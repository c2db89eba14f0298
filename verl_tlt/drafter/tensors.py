"""What a drafter's weights may hold: the tensors its config asks for, and maps that fit the vocabularies.

Checked by the headers of their files and, under a pruned draft vocabulary, by the maps; torch is for reading alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_tlt.drafter.other_layouts import MAPS, speculators_name
from verl_tlt.drafter.policy import (
    CONFIG,
    NUM_AUX,
    DrafterError,
    Fields,
    Header,
    headers,
    tensor_files,
)
from verl_tlt.drafter.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "F16", "BF16")
MAP_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64")}
_POLICYS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Beginnings of names of what a file may hold besides: copies of the policy's tensors, and tables that are computed."""


def check_tensors(directory: Path, config: Fields, others: bool) -> dict[str, Header]:
    """Where the drafter's tensors are, by speculators' names, whichever the files give them.

    A `DrafterError` for the first that is missing, unknown, or not as `config` asks for, which is in speculators' form;
    `others`: the names are SafeAILab's, SpecForge's or ModelOpt's.
    """
    wanted, (listing, owners) = _wanted(config), tensor_files(directory)
    names: dict[str, str] = {}
    for name in owners:
        known = speculators_name(name) if others else name
        if known in names:
            raise DrafterError(f"{listing}: {name} and {names[known]} are the same tensor of the drafter.")
        if known is not None:
            names[known] = name
    held = headers(directory, listing, {name: owners[name] for name in names.values()})
    found = {known: held[name] for known, name in names.items()}
    vocab = config["transformer_layer_config"]["vocab_size"]
    for name, shape in {**wanted, **({"t2d": [vocab]} if "t2d" in found and "d2t" in wanted else {})}.items():
        if name not in found:
            raise DrafterError(f"{listing} has no tensor {name!r}.")
        here, kinds = found[name], MAP_TYPES.get(name, FLOATS)
        if here.shape != shape:
            raise DrafterError(f"{here.file}: {here.name} is {here.shape}, but {CONFIG} asks for {shape}.")
        if here.kind not in kinds:
            raise DrafterError(f"{here.file}: {here.name} holds {here.kind}, but must hold {' or '.join(kinds)}.")
    if unknown := sorted(name for name in found.keys() - wanted.keys() - set(MAPS) if not name.startswith(_POLICYS)):
        raise DrafterError(f"{listing} holds {unknown[0]}, which the network that {CONFIG} describes does not have.")
    if "d2t" in found:
        _check_maps(found, config["draft_vocab_size"], vocab)
    return found


def _check_maps(found: Mapping[str, Header], drafted: int, vocab: int) -> None:
    """Draft id i stands for token i + d2t[i]: ascending tokens of the policy, those that t2d marks if it is there."""
    file = found["d2t"].file
    if found["d2t"].shape != [drafted] or found["d2t"].kind not in MAP_TYPES["d2t"]:
        raise DrafterError(f"{file}: d2t must hold {drafted} whole numbers, as {CONFIG} asks for.")
    offsets = _array(found["d2t"]).astype(np.int64)  # [DV]
    ids = np.arange(len(offsets))
    wrong = np.flatnonzero((offsets < -ids) | (offsets >= vocab - ids))
    if wrong.size:
        i = int(wrong[0])
        raise DrafterError(
            f"{file}: d2t[{i}]={int(offsets[i])} makes draft id {i} stand for token {i + int(offsets[i])}, outside "
            f"0..{vocab - 1}."
        )
    tokens = ids + offsets
    if (wrong := np.flatnonzero(np.diff(tokens) <= 0)).size:
        i = int(wrong[0])
        raise DrafterError(
            f"{file}: d2t must name ascending distinct tokens, but draft ids {i} and {i + 1} stand for {tokens[i]} and "
            f"{tokens[i + 1]}."
        )
    if drafted < vocab and "t2d" in found and not np.array_equal(tokens, np.flatnonzero(_array(found["t2d"]))):
        where = found["t2d"].file
        raise DrafterError(f"{where}: t2d does not mark the {len(tokens)} tokens that d2t names, and no others.")


def _array(header: Header) -> Any:
    with TensorFile(header.file, "np") as reader:
        return reader.get_tensor(header.name)


def read_tensors(found: Mapping[str, Header]) -> dict[str, torch.Tensor]:
    """These tensors, on the host; a `DrafterError` where one holds NaN or infinity."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({header.file for header in found.values()}):
        with TensorFile(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(at.name) for name, at in found.items() if at.file == file}
    if (broken := not_finite(tensors)) is not None:
        raise DrafterError(f"{found[broken].file}: {found[broken].name} holds NaN or infinity.")
    return tensors


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first that holds NaN or infinity."""
    return next((n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)


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
    if layer["attention_bias"]:
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        wanted |= {f"{attention}{name}.bias": [width] for name, width in widths.items()}
    if config["fc_norm"]:
        wanted |= {f"fc_norm.{i}.weight": [hidden] for i in range(NUM_AUX)}
    if config["norm_before_fc"]:
        wanted["input_norm.weight"] = [NUM_AUX * hidden]
    draft_vocab, vocab = config["draft_vocab_size"], layer["vocab_size"]
    if draft_vocab != vocab or config.get("own_head"):
        wanted["lm_head.weight"] = [draft_vocab, hidden]
    if draft_vocab != vocab:
        wanted["d2t"] = [draft_vocab]
    return wanted
