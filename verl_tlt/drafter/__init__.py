"""The EAGLE-style drafter: build, align, pack, train, evaluate, save. No verl, vLLM or Ray.

    from verl_tlt.drafter import build_drafter, refresh_verifier_weights, DrafterTrainer, save_drafter

Names load on first use: `speculators` takes seconds to import, and the driver's checks need none of it.
examples/train_drafter.py goes from a policy to a drafter that `vllm serve` loads.

What can be imported from here is the interface; files below may move. A name or argument may change with a minor
version of verl-tlt 0.x, not with a patch version, and drafters that an earlier version wrote stay loadable. What a
caller did wrong raises `DrafterError`, a `TLTError` and `ValueError` that names it.

Letters in shapes: B sequences, L tokens of one, T of a packed batch, H the policy's hidden size, V its vocabulary.
"""

import importlib
from typing import Any

_PUBLIC = {
    "policy": ("DrafterError", "PolicyShape", "policy_shape", "aux_layers_for"),
    "build": (
        "build_drafter", "default_attention", "drafter_config", "choose_tokens", "halve_frozen", "most_frequent",
    ),
    "verifier": ("VerifierWeights", "refresh_verifier_weights"),
    "data": ("TrainingSequence", "from_numpy16", "to_numpy16", "Batch", "align", "batches", "pack", "windows"),
    "capture": ("Library", "PolicyStates", "Text", "load_policy", "plan_epoch"),
    "train": ("DrafterTrainer", "StepResult", "TrainSummary", "train_until", "trainable_parameters"),
    "memory": ("DrafterMemory", "host_bytes", "session_bytes"),
    "evaluate": ("SequenceScore", "accept_length", "acceptance"),
    "check": ("check_drafter", "files_digest"),
    "mtp_write_back": ("write_back",),
    "checkpoint": (
        "from_drafter_file", "load_drafter", "load_own_head", "load_training_state", "provenance", "save_drafter",
        "serving_tensors", "to_drafter_file",
    ),
}  # fmt: skip
"""By module."""
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import the submodule a public name lives in (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
