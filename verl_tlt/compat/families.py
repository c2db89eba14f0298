"""Whether the installed vLLM can draft for a policy with an EAGLE-3 head, read from its sources."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from verl_tlt.compat.sources import source_root

MODELS = "vllm/model_executor/models"
INTERFACE = "SupportsEagle3"
"""What a model class of vLLM inherits when it hands hidden states to an EAGLE-3 head."""


@functools.cache
def serves_eagle3(architecture: str, root: Path | None = None) -> bool | None:
    """Whether vLLM's class for `architecture` has the interface; None: vLLM has no such class. Nothing is imported.

    Args:
        architecture: of a Hugging Face config, such as "Qwen3ForCausalLM".
        root: the directory that holds `vllm/`; None: the installed one.
    """
    root = root or source_root("vllm")
    place = None if root is None else _registered(root / MODELS / "registry.py", architecture)
    if root is None or place is None:
        return None
    return INTERFACE in _ancestors(root / MODELS, *place)


def _registered(registry: Path, architecture: str) -> tuple[str, str] | None:
    """(module, class) of an architecture in vLLM's tables of models."""
    if not registry.is_file():
        return None
    for node in ast.walk(ast.parse(registry.read_text(encoding="utf-8"))):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                module, name = (ast.literal_eval(part) for part in value.elts[:2])
                return str(module), str(name)
    return None


def _ancestors(models: Path, module: str, name: str) -> set[str]:
    """Names of all classes that a class of vLLM's models inherits, as far as they are in that folder."""
    file = models / f"{module}.py"
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    found: set[str] = set()
    for base in own.bases if own else ():
        if isinstance(base, ast.Name):
            found |= {base.id} | _ancestors(models, _home(tree, base.id) or module, base.id)
    return found


def _home(tree: ast.Module, name: str) -> str | None:
    """The module of vLLM's models that a class is imported from; None where it is not imported from one."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            package, _, module = node.module.rpartition(".")
            if (node.level == 1 and not package) or package == MODELS.replace("/", "."):
                return module
    return None
