"""Builds a policy by name and refuses, in one sentence, what cannot be right."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from verl_tlt.speculation.policies.bandit import BanditPolicy, BanditSettings
from verl_tlt.speculation.policies.base import BasePolicy, FixedPolicy, TablePolicy
from verl_tlt.speculation.policies.ema import EmaPolicy, EmaSettings
from verl_tlt.speculation.policies.goodput import GoodputPolicy, GoodputSettings
from verl_tlt.speculation.types import ControlError

POLICIES = ("goodput", "bandit", "ema", "table", "fixed", "off")
"""Names `make_policy` knows."""


def make_policy(
    name: str, arms: tuple[int, ...], *, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> BasePolicy:
    """Build a policy.

    Args:
        name: one of `POLICIES`.
        arms: draft lengths it may choose, ascending, starting with 0.
        settings: the policy's own settings by name (`GoodputSettings`, `BanditSettings`, `EmaSettings`; `fixed` for
            policy fixed); besides, any policy takes `max_draft_length`, the drafter's limit, to be checked against the
            arms.
        seed: makes policies that draw random numbers repeatable.

    Raises:
        ControlError: an unknown policy or setting, arms out of order or above the limit, contradicting thresholds.
    """
    if name not in POLICIES:
        close = difflib.get_close_matches(str(name), POLICIES, n=1)
        hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(POLICIES)}."
        raise ControlError(f"Speculation policy {name!r} does not exist.{hint}")
    options = dict(settings or {})
    _check_arms(arms, options.pop("max_draft_length", None))
    if name == "goodput":
        return GoodputPolicy(arms, _settings(GoodputSettings, options, name))
    if name == "bandit":
        return BanditPolicy(arms, _settings(BanditSettings, options, name), seed)
    if name == "ema":
        return EmaPolicy(arms, _settings(EmaSettings, options, name))
    if name == "fixed":
        draft_length = options.pop("fixed", None)
        draft_length = arms[-1] if draft_length is None else draft_length
        _refuse_unknown(options, (), name)
        if draft_length not in arms:
            raise ControlError(f"Speculation setting fixed={draft_length} is not one of the arms {list(arms)}.")
        return FixedPolicy(draft_length)
    _refuse_unknown(options, (), name)
    return TablePolicy(arms) if name == "table" else FixedPolicy(0)


S = TypeVar("S")


def _settings(cls: type[S], options: Mapping[str, Any], name: str) -> S:
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    _refuse_unknown(options, tuple(defaults), name)
    for key, value in options.items():
        if not _fits(value, defaults[key]):
            raise ControlError(f"Speculation setting {key} of policy {name} cannot be {value!r}.")
    return cls(**options)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of its setting's default."""
    if default is None:
        return value is None or (isinstance(value, int) and not isinstance(value, bool))
    if isinstance(default, tuple):
        return isinstance(value, list | tuple)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int) or (isinstance(default, float) and isinstance(value, float))


def _refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...], name: str) -> None:
    for key in options:
        if key not in known:
            names = ", ".join(known) if known else "none"
            raise ControlError(f"Speculation policy {name} has no setting {key!r} (it has: {names}).")


def _check_arms(arms: tuple[int, ...], limit: int | None) -> None:
    whole = all(isinstance(k, int) and not isinstance(k, bool) for k in arms)
    if not arms or not whole or list(arms) != sorted(set(arms)) or arms[0] != 0:
        raise ControlError(f"Speculation arms must be whole numbers, ascending and starting with 0, not {list(arms)}.")
    if limit is not None and arms[-1] > limit:
        raise ControlError(f"Speculation arm {arms[-1]} is above the drafter's limit of {limit} draft tokens.")
