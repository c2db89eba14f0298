"""What verl-tlt changes in verl, vLLM and megatron-core while they run: a decorator beside the code of each change.

docs/upstream_changes.py reads the decorators from the source; patches/README.md is made of them. Subclasses that verl
and vLLM load by name (scheduler, worker extension, trainers) are no changes.
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def upstream_change(name: str, **facts: str | tuple[str, ...]) -> Callable[[F], F]:
    """Say why the decorated code changes upstream code; `facts` are fields of `UpstreamChange` there, as literals."""
    return lambda code: code
