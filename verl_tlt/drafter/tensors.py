"""What a drafter's `model.safetensors` may hold: the tensors its config asks for, and maps that fit the vocabularies.

Read from the file's header and, under a pruned draft vocabulary, its two maps; without torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verl_tlt.drafter.other_layouts import MAPS, speculators_name
from verl_tlt.drafter.policy import CONFIG, NUM_AUX, DrafterError, Fields
from verl_tlt.drafter.tensor_file import TensorFile

FLOATS = ("F32", "F16", "BF16")
MAP_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64")}
_POLICYS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Beginnings of names of what a file may hold besides: copies of the policy's tensors, and tables that are computed."""


def check_tensors(file: Path, config: Fields, others: bool) -> None:
    """Raise a `DrafterError` for the first tensor of a file that is missing, unknown, or not as `config` asks for.

    `config` is in speculators' form; `others`: the names in the file are SafeAILab's or SpecForge's.
    """
    wanted = _wanted(config)
    pruned = "d2t" in wanted
    with TensorFile(file, "np") as reader:
        names: dict[str, str] = {}
        for name in reader.names:
            known = speculators_name(name) if others else name
            if known in names:
                raise DrafterError(f"{file}: {name} and {names[known]} are the same tensor of the drafter.")
            if known is not None:
                names[known] = name
        for name, shape in wanted.items():
            if name not in names:
                raise DrafterError(f"{file} has no tensor {name!r}.")
            if (found := reader.shape(names[name])) != shape:
                raise DrafterError(f"{file}: {name} is {found}, but {CONFIG} asks for {shape}.")
            if (kind := reader.kind(names[name])) not in (types := MAP_TYPES.get(name, FLOATS)):
                raise DrafterError(f"{file}: {name} holds {kind}, but must hold {' or '.join(types)}.")
        besides = names.keys() - wanted.keys() - (set() if pruned else set(MAPS))
        if unknown := sorted(name for name in besides if not name.startswith(_POLICYS)):
            raise DrafterError(f"{file} holds {unknown[0]}, which the network that {CONFIG} describes does not have.")
        if pruned:
            _check_maps(file, reader, names, config["transformer_layer_config"]["vocab_size"])


def _check_maps(file: Path, reader: TensorFile, names: dict[str, str], vocab: int) -> None:
    """Draft id i stands for token i + d2t[i]: ascending tokens of the policy, those that t2d marks."""
    offsets = reader.get_tensor(names["d2t"]).astype(np.int64)  # [DV]
    kept = np.flatnonzero(reader.get_tensor(names["t2d"]))  # [tokens kept]
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
    if not np.array_equal(tokens, kept):
        raise DrafterError(f"{file}: t2d does not mark the {len(tokens)} tokens that d2t names, and no others.")


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
        wanted |= {"d2t": [draft_vocab], "t2d": [vocab]}
    return wanted
