"""The model card of a drafter, ready for the hub: what it drafts for, how to serve it, how it was made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from verl_tlt.commands.serve import serve_command
from verl_tlt.drafter.model_files import is_name
from verl_tlt.drafter.policy import MTP

SHOWN = (
    "accept length", "draft positions", "objective", "temperature", "top_p", "top_k", "prompts", "responses",
    "response_tokens", "training_seconds", "date",
)  # fmt: skip


def model_card(method: str, name: str, policy: str | os.PathLike[str], facts: Mapping[str, object]) -> str:
    """The text of `README.md`, without paths of this machine. Only a policy on the hub is named as its base model."""
    from huggingface_hub import ModelCardData

    base = os.fspath(policy) if is_name(policy) else Path(policy).resolve().name
    data = ModelCardData(
        base_model=base if is_name(policy) else None,
        base_model_relation="adapter" if is_name(policy) else None,
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
