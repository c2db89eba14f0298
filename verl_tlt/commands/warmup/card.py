"""The model card of a drafter, ready for the hub: what it drafts for, how to serve it, how it was made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from verl_tlt.commands.serve import serve_command
from verl_tlt.drafter.policy import MTP, is_name

SHOWN = (
    "accept length", "draft positions", "objective", "temperature", "top_p", "top_k", "prompts", "responses",
    "response_tokens", "training_seconds", "date",
)  # fmt: skip


def model_card(method: str, name: str, policy: str | os.PathLike[str], facts: Mapping[str, object]) -> str:
    """The text of `README.md`: no path of this machine is in it.

    Base model and licence are named where they are known: by a policy's name on the hub, and by its own model card.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = os.fspath(policy) if is_name(policy) else Path(policy).resolve().name
    own = Path(policy, "README.md")
    known = ModelCard.load(own).data if own.is_file() else None
    data = ModelCardData(
        base_model=os.fspath(policy) if is_name(policy) else getattr(known, "base_model", None),
        base_model_relation="adapter" if is_name(policy) else None,
        license=getattr(known, "license", None),
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
