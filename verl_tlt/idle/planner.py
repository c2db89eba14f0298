"""What a planner of idle time asks for during one sampling phase, and how much idle time the phase had.

The planners (`idle.replica_idle`, `idle.trainer_idle`) take observations and answers as method calls from one thread at
a time, with times in seconds from any one monotonic clock; `trainer.watch` carries their commands out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class _Command:
    replica: str


class LeaveBalancer(_Command):
    """Take the replica out of the load balancer; answer with `left`, or `failed`."""


class TrySleep(_Command):
    """Ask the server to close its gate and sleep; answer with `slept`, `refused` (it still serves), or `failed`."""


class StartTraining(_Command):
    """Start the replica's spot worker; answer with `training`, later `done` or `failed`."""


class StopTraining(_Command):
    """Stop the replica's spot worker (it may have only just been started); answer with `stopped` or `failed`."""


class WakeUp(_Command):
    """Ask the sleeping server to serve again with the weights it has; answer with `awake`, or `failed`."""


class Rejoin(_Command):
    """Put the replica back into the load balancer."""


Command = LeaveBalancer | TrySleep | StartTraining | StopTraining | WakeUp | Rejoin


@dataclass(frozen=True)
class PhaseAccount:
    """Idle time of one sampling phase and what was trained in it. Dicts are keyed by replica; times in seconds."""

    bubble_s: dict[str, float]
    """From the replica's last request until the last request of all; on the trainer's devices: its wait for samples."""
    used_s: dict[str, float]
    """Part of `bubble_s` in which the replica's spot worker trained."""
    stop_s: dict[str, float]
    """From the stop command until the worker answered."""
    failures: int
    """Sessions that failed at any stage."""
    end: float
    """When the last request of all had finished (the planner's clock): where every bubble ends."""
    lost: int = 0
    """Times the load balancer no longer knew a replica that had not left it."""


def combined(first: PhaseAccount | None, second: PhaseAccount) -> PhaseAccount:
    """Several sampling phases of one RL step as one: seconds and counts add up, `end` is the last one's."""
    if first is None:
        return second
    return PhaseAccount(
        bubble_s=_sum(first.bubble_s, second.bubble_s),
        used_s=_sum(first.used_s, second.used_s),
        stop_s=_sum(first.stop_s, second.stop_s),
        failures=first.failures + second.failures,
        end=second.end,
        lost=first.lost + second.lost,
    )


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


PATIENCE = 5
"""The longest pause between two looks, in shortest ones. A look costs round trips to the balancer: CPU time that the
engines want where they share a few cores with it."""


def next_pause(pause: float, shortest: float, changed: bool) -> float:
    """Seconds until the next look: the shortest after a change, half as long again after none."""
    return shortest if changed else min(1.5 * pause, PATIENCE * shortest)
