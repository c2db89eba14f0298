"""The EAGLE-style drafter: build, align, pack, train, evaluate, save. No verl, vLLM or Ray.

    from verl_tlt.drafter import build_drafter, refresh_verifier_weights, DrafterTrainer, save_drafter

Names load on first use: `speculators` takes seconds to import, and the driver's checks need none of it.
"""

from __future__ import annotations

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
    "device_residency": ("DeviceResidency", "DrafterMemory", "host_bytes", "session_bytes"),
    "evaluate": ("SequenceScore", "accept_length", "acceptance"),
    "check": ("check_drafter", "check_owner", "files_digest"),
    "digest": ("fingerprint",),
    "mtp_write_back": ("write_back",),
    "checkpoint": (
        "from_drafter_file", "load_drafter", "load_own_head", "load_training_state", "provenance", "save_drafter",
        "serving_tensors", "to_drafter_file",
    ),
}  # fmt: skip
"""By module, in the order of docs/api.md."""
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import the submodule a public name lives in (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
