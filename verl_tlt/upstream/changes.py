"""What verl-tlt changes in verl, vLLM and megatron-core while they run: a decorator beside the code of each change.

`sources.declared` reads the decorators from the source, without importing anything; patches/README.md is made of them.
Subclasses that verl and vLLM load by name (scheduler, worker extension, trainers) are no changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., object])

CAUSES_IN = {"verl": "0.9.1", "vllm": "0.28.0", "megatron-core": "0.16.1"}
"""The releases whose line numbers the causes name."""
OFFERED = {
    "verl/0007-weights-reach-the-v2-drafter.patch": "verl syncs the policy's weights into a drafter of vLLM's V1 model "
    "runner alone (`verl/workers/rollout/vllm_rollout/utils.py`, `_get_drafter_model`). V2, the default for every "
    "model from vLLM 0.29 on, calls it `speculator`: an MTP head then stays as it was loaded, and nothing says so. "
    "verl-tlt loads its drafters itself.",
}
"""Diffs of defects that verl-tlt met upstream and does without: the file below patches/, and what it is for."""


class UpstreamChange(NamedTuple):
    """One change to an upstream library while it runs."""

    applied_by: str
    """`module:function` or `module:Class.method` of the code that makes the change."""
    name: str
    """What holds with the change."""
    replaces: tuple[str, ...]
    """`module:symbol` of what is replaced."""
    symptom: str
    """What goes wrong without it."""
    cause: str
    """File, line and code of a release in `CAUSES_IN`, and why that is the cause."""
    releases: str
    """Those it applies to."""
    removed_by: str = "Nothing: it is no defect of code written for CUDA. It is a stand-in for the hardware."
    """What upstream has to have so that the change can go; the code steps aside by itself where it says so."""
    upstream: str = "none found"
    """Issues and pull requests."""
    patch: str = ""
    """Upstream form of the change: a diff below patches/."""


def upstream_change(name: str, **facts: str | tuple[str, ...]) -> Callable[[F], F]:
    """Say of the code that makes a change why it does; `facts` are other fields of `UpstreamChange`, as literals."""
    return lambda code: code
