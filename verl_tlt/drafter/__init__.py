"""The EAGLE-style drafter: build, align, pack, train, evaluate, save. No verl, vLLM or Ray.

    from verl_tlt.drafter import build_drafter, refresh_verifier_weights, DrafterTrainer, save_drafter

Names load on first use: `speculators` takes seconds to import, and the driver's checks need none of it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "DrafterError": "policy",
    "PolicyShape": "policy",
    "policy_shape": "policy",
    "aux_layers_for": "policy",
    "build_drafter": "build",
    "default_attention": "build",
    "drafter_config": "build",
    "halve_frozen": "build",
    "most_frequent": "build",
    "trainable_parameters": "build",
    "VerifierWeights": "build",
    "refresh_verifier_weights": "build",
    "TrainingSequence": "data",
    "from_numpy16": "data",
    "to_numpy16": "data",
    "Batch": "data",
    "align": "data",
    "batches": "data",
    "pack": "data",
    "shuffled": "data",
    "windows": "data",
    "Library": "capture",
    "PolicyStates": "capture",
    "Text": "capture",
    "load_policy": "capture",
    "plan_epoch": "capture",
    "DrafterTrainer": "train",
    "StepResult": "train",
    "TrainSummary": "train",
    "train_until": "train",
    "DeviceResidency": "device_residency",
    "session_bytes": "device_residency",
    "SequenceScore": "evaluate",
    "accept_length": "evaluate",
    "acceptance": "evaluate",
    "check_drafter": "check",
    "check_owner": "check",
    "files_digest": "check",
    "fingerprint": "digest",
    "load_drafter": "checkpoint",
    "provenance": "checkpoint",
    "save_drafter": "checkpoint",
    "serving_tensors": "checkpoint",
    "to_drafter_file": "checkpoint",
    "load_training_state": "checkpoint",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import the submodule a public name lives in (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
