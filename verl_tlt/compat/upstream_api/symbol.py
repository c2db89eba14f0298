"""A thing of verl's or vLLM's that we rely on; `compat.sources` looks it up in a release's source text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """Something of verl's or vLLM's that our code calls, overrides, replaces or reads."""

    name: str
    """`module:qualified.name`; for a module itself, `module:`."""
    takes: str = ""
    """Names of the first parameters, in order, `self` left out; space-separated like the next one."""
    has: str = ""
    """Names that the class or module must define; its bases within the package count."""
    says: tuple[str, ...] = ()
    """Fragments that its source must contain, where we rely on how it is written."""
    used_by: str = ""
    """Our file, below the package that lists it."""

    @property
    def package(self) -> str:
        """verl or vllm."""
        return self.name.partition(".")[0]
