"""What in a verl config asks for TLT.

Read in the driver of every verl run, with TLT or without: standard library only, and the config stays as it is.
"""

from collections.abc import Mapping, Sequence

from verl_tlt import MODE_PREFIX

NAME = "tlt"
KEY = "plugin"


def wanted(config: Mapping[str, object]) -> bool:
    """Whether a verl config asks for TLT: `trainer.plugin=tlt`, or a trainer mode that only TLT has."""
    trainer = _node(config, "trainer")
    if str(trainer.get(KEY) or "").strip().lower() == NAME:
        return True
    return str(_node(trainer, "v1").get("trainer_mode") or "").startswith(MODE_PREFIX)


def refusal(config: Mapping[str, object]) -> str | None:
    """Why a config that does not ask for TLT must not run as stock verl, in one sentence; None where it may.

    There are two reasons: `trainer.plugin` has another name, or there is a `tlt` node but no `trainer.plugin`.
    `trainer.plugin=null` beside a `tlt` node says that this run is to be stock verl.
    """
    if wanted(config):
        return None
    trainer = _node(config, "trainer")
    if name := trainer.get(KEY):
        return f"trainer.{KEY}={name} names no trainer plugin that is installed here (installed: {NAME})."
    if config.get(NAME) is not None and KEY not in trainer.keys():  # noqa: SIM118 (OmegaConf's `in` resolves values)
        off = f"+trainer.{KEY}=null to run stock verl"
        return f"the {NAME} node does nothing without trainer.{KEY}: add +trainer.{KEY}={NAME}, or {off}."
    return None


def joined(words: Sequence[str]) -> list[str]:
    """The command line, changed so that both forms of the flag, or one of them twice, count as one.

    `+tlt=default` sets `trainer.plugin` too, and Hydra refuses to add what is there already.
    """
    switch, plugin = f"+{NAME}=default", f"+trainer.{KEY}="
    once = [word for i, word in enumerate(words) if word != switch or word not in words[:i]]
    return [f"+{word}" if word.startswith(plugin) else word for word in once]


def misspelt(overrides: Sequence[str]) -> str | None:
    """What to write in place of an override that is meant for TLT and that verl's own config does not take.

    One sentence; None where there is no such override. A config of the user's own may have these keys.
    """
    switch = f"+{NAME}=default"
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == NAME and value != "default":
            return f"{override} names no settings of verl-tlt: write {switch}."
        if key in (NAME, f"trainer.{KEY}"):
            return f"{override} needs a plus, since verl's config has no {key} to change: write +{override}."
        if key.startswith(f"{NAME}.") and switch not in overrides:
            return f"{override} changes a setting that is not there without {switch}: add that."
    return None


def _node(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A node of the config; empty where there is none, or something else in its place, which verl will refuse."""
    node = config.get(key)
    return node if isinstance(node, Mapping) else {}
