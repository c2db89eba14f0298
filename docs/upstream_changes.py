"""What the code says of its changes to verl, vLLM and megatron-core, read from its `@upstream_change` decorators.

Nothing is imported. patches/README.md is made of them (`generate.py`).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

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


def declared(package: Path) -> list[UpstreamChange]:
    """The changes of upstream libraries that the code below a package's directory says it makes, by file and line."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if "@upstream_change(" not in (text := path.read_text(encoding="utf-8")):
            continue
        module, tree = ".".join(path.relative_to(package.parent).with_suffix("").parts), ast.parse(text)
        places = [("", node) for node in tree.body]
        places += [(f"{c.name}.", node) for c in tree.body if isinstance(c, ast.ClassDef) for node in c.body]
        for within, node in places:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "upstream_change":
                    facts = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
                    code = f"{module}:{within}{getattr(node, 'name', '')}"
                    found.append(UpstreamChange(code, ast.literal_eval(call.args[0]), **facts))
    return found
