"""What in a verl config asks for TLT, and what looks as if it did and would do nothing.

Read in the driver of every verl run, with TLT or without. So it uses the standard library only, changes nothing in the
config, and looks at no value but those of the few keys that could have been meant for TLT.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from importlib.metadata import entry_points
from typing import Any

from verl_tlt import MODE_PREFIX

NAME = "tlt"
KEY = "plugin"
GROUP = "verl.trainer_plugins"
"""Entry points by which a package says that `trainer.plugin=<name>` is its own."""
ALIKE = 0.66
"""Similarity (`difflib`'s, 0 to 1) from which a key or a value counts as a slip of the hand."""


def wanted(config: Any) -> bool:
    """Whether a verl config asks for TLT: `trainer.plugin=tlt`, or a trainer mode that only TLT has."""
    trainer = _node(config, "trainer")
    if str(trainer.get(KEY) or "").strip().lower() == NAME:
        return True
    return str(_node(trainer, "v1").get("trainer_mode") or "").startswith(MODE_PREFIX)


def mistaken(config: Any) -> str | None:
    """Why a config that does not ask for TLT was probably meant to, in one sentence; None where nothing suggests it.

    `trainer.plugin=null` beside a `tlt` node is no mistake: it says that this run is to be stock verl.
    """
    if wanted(config):
        return None
    trainer = _node(config, "trainer")
    name = trainer.get(KEY)
    if name:
        known = sorted(point.name for point in entry_points(group=GROUP))
        if name in known:
            return None
        hint = f"; did you mean trainer.{KEY}={NAME}?" if _alike(name, NAME) else f" (installed: {', '.join(known)})."
        return f"trainer.{KEY}={name} names no trainer plugin that is installed here{hint}"
    for where, node in (("", config), ("trainer.", trainer), ("trainer.v1.", _node(trainer, "v1"))):
        for key in node.keys():  # noqa: SIM118 (iterating OmegaConf's own would resolve values)
            misplaced = str(key) != KEY or where != "trainer."
            if misplaced and _alike(key, KEY) and _alike(node.get(key), NAME):
                return f"{where}{key}={node.get(key)} has no effect; did you mean trainer.{KEY}={NAME}?"
    if config.get(NAME) is not None and KEY not in trainer.keys():  # noqa: SIM118
        return (
            f"{_first_key(config.get(NAME), NAME)} is set but TLT is off: add +trainer.{KEY}={NAME}, or "
            f"+trainer.{KEY}=null to run stock verl."
        )
    return None


def _node(config: Any, key: str) -> Any:
    """A node of the config; empty where there is none, or something else in its place, which verl will refuse."""
    node = config.get(key)
    return node if isinstance(node, Mapping) else {}


def _alike(word: Any, meant: str) -> bool:
    text = str(word).lower()
    return meant in text or SequenceMatcher(None, text, meant).ratio() >= ALIKE


def _first_key(node: Any, name: str) -> str:
    """The full name of the first setting in or below `node`."""
    while hasattr(node, "keys") and node.keys():
        key = next(iter(node.keys()))
        node, name = node.get(key), f"{name}.{key}"
    return name
