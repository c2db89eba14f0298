"""The model card of a drafter, ready for the hub: what it drafts for, how to serve it, how it was made."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_tlt.commands.serve import serve_command
from verl_tlt.drafter.policy import CONFIG, MTP, first_line, folder, is_name

logger = logging.getLogger(__name__)

SHOWN = (
    "accept length", "draft positions", "objective", "temperature", "top_p", "top_k", "prompts", "responses",
    "response_tokens", "training_seconds", "date",
)  # fmt: skip


def model_card(method: str, name: str, policy: str | os.PathLike[str], facts: Mapping[str, object]) -> str:
    """The text of `README.md`: no path of this machine is in it.

    Base model and licence are named where they are known: by a policy's name on the hub, and by its own model card.
    """
    from huggingface_hub import ModelCardData

    own = policys_card(policy)
    base = os.fspath(policy) if is_name(policy) else Path(policy).resolve().name
    named = base if is_name(policy) else own.get("base_model")
    data = ModelCardData(
        base_model=named if isinstance(named, str) and is_name(named) else None,
        base_model_relation="adapter" if is_name(policy) else None,
        license=own.get("license"),
        library_name="speculators",
        tags=["speculative-decoding", method, "vllm", "verl-tlt"],
    )
    rows = "\n".join(f"| {key} | {facts[key]} |" for key in SHOWN if key in facts)
    kind = "The head for multi-token prediction" if method == MTP else "An EAGLE-3 drafter"
    return f"""---
{data.to_yaml()}
---
# {name}

{kind} for {base}. It drafts tokens for this policy, and is no language model of its own. With another policy, or
another version of this one, fewer drafted tokens are accepted. Speculative decoding does not change the distribution
of the answers, only how fast they come.

    {serve_command(method, name, base)}

| | |
|---|---|
{rows}

Made with verl-tlt.
"""


def policys_card(policy: str | os.PathLike[str]) -> dict[str, Any]:
    """What a policy's own model card says of it; empty where it has none here, or one that cannot be read."""
    from huggingface_hub import ModelCard

    try:
        file = folder(policy, (CONFIG,), fetch=False) / "README.md"
        return ModelCard.load(file, ignore_metadata_errors=True).data.to_dict() if file.is_file() else {}
    except Exception as error:  # the drafter is trained by now, and a card may hold anything
        logger.warning("The model card of %s cannot be read (%s): no licence is named.", policy, first_line(error))
        return {}
