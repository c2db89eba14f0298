"""Policies of others, to compare `goodput` with: TLT's bandit and SGLang's tiers.

An engine takes one through `additional_config.tlt.policy_factory`, for example `benchmarks.control.policies:bandit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.control.policies.bandit import BanditPolicy
from benchmarks.control.policies.ema import EmaPolicy
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import Policy

RIVALS = ("ema", "bandit")


def bandit(speculation: Mapping[str, Any], arms: Sequence[int], seed: int) -> Policy:
    """TLT's bandit with its settings as they are by default."""
    return BanditPolicy(arms, seed=seed)


def ema(speculation: Mapping[str, Any], arms: Sequence[int], seed: int) -> Policy:
    """SGLang's tiers with their settings as they are by default."""
    return EmaPolicy(arms)


def named(name: str, arms: tuple[int, ...]) -> Policy:
    """A policy of the package or one of `RIVALS`."""
    own = {"bandit": bandit, "ema": ema}.get(name)
    return own({}, arms, 0) if own else make_policy(name, arms)
