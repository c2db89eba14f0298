"""What can be changed and checked while a run goes on: a switch in a file, and an audit against stock decoding.

The switch is a small YAML file in the trace directory, because whoever watches a run has that directory and perhaps
nothing else of it. The trainer reads it between two rollouts. The audit answers the one question `tlt/saved_s` cannot:
its baseline was measured at the start, on short contexts. Every N steps one replica decodes a whole rollout without the
drafter, and the others' time is compared with what that replica needed at the same loads. Standard library and PyYAML
only: `verl-tlt switch` runs where nothing else is installed.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger(__name__)

SWITCH_FILE = "tlt_control.yaml"
ENOUGH = 0.5
"""Least share of the others' decoding time at loads the audited replica has seen too; below it nothing is reported."""

Work = Sequence[Sequence[float]]
"""Decode-only engine steps of one rollout, summed by batch: (batch, seconds, tokens)."""


class SwitchError(ValueError):
    """The switch's file cannot be understood; the message names file and key."""


@dataclass(frozen=True)
class Switch:
    """Which halves of TLT run from the next rollout on."""

    speculation: bool = True
    """False: the drafter's pass does not run in any engine."""
    spot: bool = True
    """False: no replica leaves early, and nothing is trained."""


def read_switch(directory: str | Path) -> Switch:
    """The switch as the file in a trace directory has it; all on where there is no file.

    Raises:
        SwitchError: no YAML mapping, an unknown key, or a value that is neither on nor off.
    """
    path = Path(directory) / SWITCH_FILE
    try:
        node = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        return Switch()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SwitchError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(node, dict):
        raise SwitchError(f"{path} must hold lines such as `speculation: off`.")
    for key, value in node.items():
        if key not in asdict(Switch()):
            raise SwitchError(f"{path}: {key} is not a switch; there are {' and '.join(asdict(Switch()))}.")
        if not isinstance(value, bool):  # YAML reads on and off as booleans
            raise SwitchError(f"{path}: {key} must be on or off, not {value!r}.")
    return Switch(**node)


def write_switch(directory: str | Path, **changes: bool | None) -> Switch:
    """Change some switches of a run; None leaves one as it is. A reader sees the old file or the new one.

    Raises:
        SwitchError: there is no such directory, or its present file cannot be understood.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise SwitchError(f"{directory} is not the trace directory of a run (tlt.trace.dir).")
    switch = replace(read_switch(directory), **{k: v for k, v in changes.items() if v is not None})
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{SWITCH_FILE}.")
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{key}: {'on' if value else 'off'}\n" for key, value in asdict(switch).items())
    os.replace(temporary, directory / SWITCH_FILE)
    return switch


def audited(step: int, replicas: Sequence[str], every: int) -> str | None:
    """Which replica decodes this step's rollout as stock would: each in turn; None in most steps, and without a peer.

    Args:
        step: RL step of the rollout.
        replicas: all of them, in a fixed order.
        every: steps from one audit to the next; 0: never.
    """
    if every <= 0 or step % every or len(replicas) < 2:
        return None
    return replicas[step // every % len(replicas)]


def audit_saving(stock: Work, others: Sequence[Work]) -> tuple[float, float] | None:
    """What drafting saved, measured against a replica that decoded the same rollout without it.

    Stock needs one step of batch b for every b tokens; what such a step takes is what the audited replica's steps took.
    Only batches are compared that lie within those the audited replica had.

    Args:
        stock: the audited replica's work.
        others: that of the replicas which drafted.

    Returns:
        (share of stock's seconds that was saved, negative if lost; share of the others' seconds that was compared),
        or None where too little can be compared.
    """
    step_s = sorted((batch, seconds * batch / tokens) for batch, seconds, tokens in stock if tokens > 0)
    every = [row for work in others for row in work if row[2] > 0]
    if not step_s or not every:
        return None
    low, high = step_s[0][0], step_s[-1][0]
    compared = [row for row in every if low <= row[0] <= high]
    spent, total = sum(row[1] for row in compared), sum(row[1] for row in every)
    if not spent or spent < ENOUGH * total:
        return None
    stock_s = sum(tokens / batch * _between(step_s, batch) for batch, _, tokens in compared)
    return 1.0 - spent / stock_s, spent / total


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation; `at` lies within the sorted points."""
    after = next(i for i, (x, _) in enumerate(points) if x >= at)
    (x1, y1), (x0, y0) = points[after], points[max(after - 1, 0)]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


class LiveControl:
    """The trainer's side: reads the switch between rollouts and says which replicas rest from drafting.

    Args:
        directory: of the switch (`tlt.trace.dir`).
        replicas: all replicas, in a fixed order.
        audit_every: `tlt.speculation.audit_every`.
    """

    def __init__(self, directory: str, replicas: Sequence[str], audit_every: int) -> None:
        self.directory, self.replicas, self.audit_every = directory, list(replicas), audit_every
        self.switch = Switch()
        self.audited: str | None = None
        """The replica that rests in the coming rollout because it is audited."""
        self._complaint = ""

    def resting(self, step: int) -> list[str]:
        """Replicas that decode the rollout of `step` without a drafter. An unreadable file changes nothing."""
        try:
            switch = read_switch(self.directory)
            self._complaint = ""
        except SwitchError as error:
            if str(error) != self._complaint:
                logger.warning("%s TLT goes on as before.", error)
            self._complaint, switch = str(error), self.switch
        if switch != self.switch:
            said = ", ".join(f"{key} {'on' if value else 'off'}" for key, value in asdict(switch).items())
            logger.warning("TLT was switched from outside; from step %d on: %s", step, said)
        self.switch = switch
        self.audited = audited(step, self.replicas, self.audit_every) if switch.speculation else None
        if not switch.speculation:
            return self.replicas
        return [self.audited] if self.audited else []

    def report(self, stats: Mapping[str, Mapping[str, Any]]) -> float | None:
        """The saving that this rollout's audit showed (`tlt/audit_saved_frac`); None without an audit or enough data.

        Args:
            stats: the schedulers' answers by replica (`Aggregates.to_dict`).
        """
        name, self.audited = self.audited, None
        if name is None or not stats.get(name, {}).get("work"):
            return None
        found = audit_saving(stats[name]["work"], [s["work"] for n, s in stats.items() if n != name and s.get("work")])
        if found is None:
            logger.info("audit: %s decoded without a drafter, at loads too unlike the others' to compare", name)
            return None
        logger.info(
            "audit: drafting saved %.1f %% of decoding time (%.0f %% of it compared)", *(100 * x for x in found)
        )
        return found[0]
