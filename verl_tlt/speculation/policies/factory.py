"""Builds a policy by its name in `tlt.speculation.policy`."""

from __future__ import annotations

from verl_tlt.speculation.policies.base import BasePolicy, FixedPolicy, TablePolicy
from verl_tlt.speculation.policies.goodput import GoodputPolicy
from verl_tlt.speculation.types import ControlError

POLICIES = ("goodput", "table", "fixed", "off")
"""Names `make_policy` knows."""


def make_policy(name: str, arms: tuple[int, ...], fixed: int | None = None) -> BasePolicy:
    """Build a policy.

    Args:
        name: one of `POLICIES`.
        arms: draft lengths it may choose, ascending, starting with 0.
        fixed: the K of policy `fixed`; None: the longest arm.

    Raises:
        ControlError: an unknown policy, or a `fixed` that is not among the arms.
    """
    if name == "goodput":
        return GoodputPolicy(arms)
    if name == "table":
        return TablePolicy(arms)
    if name == "off":
        return FixedPolicy(0)
    if name != "fixed":
        raise ControlError(f"Speculation policy {name!r} does not exist; known: {', '.join(POLICIES)}.")
    draft_length = arms[-1] if fixed is None else fixed
    if draft_length not in arms:
        raise ControlError(f"Speculation setting fixed={draft_length} is not one of the arms {list(arms)}.")
    return FixedPolicy(draft_length)
