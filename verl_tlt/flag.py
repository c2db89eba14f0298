"""What in a verl config or on its command line asks for TLT.

Read in the driver of every verl run, with TLT or without: standard library only, and the config stays as it is.
"""

import difflib
import re
from collections.abc import Mapping, Sequence

from verl_tlt import MODE_PREFIX

NAME = "tlt"
KEY = "plugin"
SWITCH = f"trainer.{KEY}"
MAIN = "verl.trainer.main_ppo"
CONFIG = "ppo_trainer"
"""The top-level config of `main_ppo`."""
OURS = re.compile(rf"\+{{0,2}}({re.escape(SWITCH)}|{NAME}\.[\w.]+)=")
_LIKENESS = 0.8
"""Least likeness (difflib's ratio, from 0 to 1) at which a key is taken for a typing error of another one."""


def wanted(config: Mapping[str, object]) -> bool:
    """Whether a verl config asks for TLT: `trainer.plugin=tlt`, or a trainer mode that only TLT has."""
    trainer = _node(config, "trainer")
    if str(trainer.get(KEY) or "").strip().lower() == NAME:
        return True
    return str(_node(trainer, "v1").get("trainer_mode") or "").startswith(MODE_PREFIX)


def refusal(config: Mapping[str, object]) -> str | None:
    """Why a config that does not ask for TLT must not run as stock verl, in one sentence; None where it may.

    There are three reasons: `trainer.plugin` has another name, another key seems to be meant for it, or there is a
    `tlt` node but no `trainer.plugin`. `trainer.plugin=null` beside a `tlt` node asks for a stock run.
    """
    if wanted(config):
        return None
    trainer = _node(config, "trainer")
    if name := trainer.get(KEY):
        return f"trainer.{KEY}={name} names no trainer plugin that is installed here (installed: {NAME})."
    if sentence := misspelt(trainer):
        return sentence
    if config.get(NAME) is not None and KEY not in trainer.keys():  # noqa: SIM118 (OmegaConf's `in` resolves values)
        off = f"+trainer.{KEY}=null to run stock verl"
        return f"the {NAME} node does nothing without trainer.{KEY}: add +trainer.{KEY}={NAME}, or {off}."
    return None


def started_program(argv: Sequence[str], orig_argv: Sequence[str]) -> str:
    """The dotted name of the module or file that Python was started with; "" where that is not known.

    `argv` and `orig_argv` are those of `sys`. While verl is imported for `python -m verl.trainer.main_ppo`, only
    `orig_argv` names the module.
    """
    if not 0 < len(argv) <= len(orig_argv):
        return ""
    return dotted(orig_argv[-len(argv)])  # the words before are Python and its own options


def dotted(word: str) -> str:
    """The name of a module that a word of a command line gives as `NAME`, `-mNAME` or a file."""
    return word.removeprefix("-m").removesuffix(".py").replace("/", ".")


def joined(words: Sequence[str]) -> list[str]:
    """The overrides of a command line, with TLT's own written as `++key=value`, which Hydra takes in every config.

    Hydra refuses them without a plus where the config lacks the keys, as verl's does. It refuses them with one plus
    where a config of the user's own has the keys.
    """
    return [f"++{word.lstrip('+')}" if OURS.match(word) else word for word in words]


def misspelt(trainer: Mapping[str, object]) -> str | None:
    """A sentence that asks for `plugin` where the trainer has a key like it with the value `tlt`; else None."""
    for key in trainer.keys():  # noqa: SIM118 (OmegaConf's iteration over values would resolve all of them)
        if key == KEY or difflib.SequenceMatcher(None, str(key), KEY).ratio() < _LIKENESS:
            continue
        value = trainer[key]
        if str(value).strip("[]'\" ").lower() == NAME:
            return f"trainer.{key}={value} is no setting of verl or verl-tlt. Did you mean +{SWITCH}={NAME}?"
    return None


def _node(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A node of the config; empty where there is none, or something else in its place, which verl will refuse."""
    node = config.get(key)
    return node if isinstance(node, Mapping) else {}
