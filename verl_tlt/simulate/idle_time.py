"""What the idle time of one simulated rollout is worth, as the product's own planner would use it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tlt.idle.planner import Command, LeaveBalancer, PhaseAccount, StartTraining, TrySleep
from verl_tlt.idle.replica_idle import ReplicaIdlePlanner


@dataclass(frozen=True)
class Spot:
    """How idle replicas train."""

    tokens_per_s: float = 0.0
    """Tokens that one replica's spot workers learn from in a second; 0: nobody trains."""
    begin_s: float = 2.0
    """From leaving the balancer to the first micro-batch: falling asleep, moving the drafter to the device."""
    settle_s: float = 0.1
    """`tlt.spot.settle_s`."""
    least_tokens: float = 8 * 1024
    """A session with fewer is not merged (`min_merge_steps` micro-batches)."""
    most_tokens: float = 3 * 8 * 8192
    """Where a session ends by itself (`max_epochs` over a full buffer)."""
    merged: float = 0.8
    """What a token is worth that one of several merged workers learned from, against one worker that sees them all."""


def harvest(spot: Spot, finish_s: Sequence[float], requests: Sequence[int], ready: bool) -> tuple[PhaseAccount, float]:
    """Drive the planner through one sampling phase.

    Args:
        spot: how replicas train.
        finish_s: when each replica had its last response, in seconds from the start of the phase.
        requests: how many requests each had at once.
        ready: the buffer is worth training on, and somebody may train.

    Returns:
        The phase's account, and the tokens of sessions that are long enough to be merged.
    """
    names = [str(i) for i in range(len(finish_s))]
    planner = ReplicaIdlePlanner(
        names, expected_requests=sum(requests), settle_s=spot.settle_s, buffer_ready=ready and spot.tokens_per_s > 0
    )
    load = dict(zip(names, requests, strict=True))
    planner.observe(0.0, load, 0)
    end = max(finish_s)
    # A look when a replica runs dry, and one when it has been empty long enough; replicas that idle leave at once.
    looks = [(t, 0, name) for t, name in zip(finish_s, names, strict=True)]
    looks += [(t + spot.settle_s, 1, name) for t, name in zip(finish_s, names, strict=True)]
    heapq.heapify(looks)
    while looks and looks[0][0] <= end:
        now, kind, name = heapq.heappop(looks)
        if kind == 0:
            load[name] = 0
        _carry_out(planner, planner.observe(now, load, 0), now + spot.begin_s, load)
    planner.end(end)
    for name in names:
        planner.stopped(name, end)
    account = planner.account(end)
    tokens = (min(seconds * spot.tokens_per_s, spot.most_tokens) for seconds in account.used_s.values())
    return account, sum(t for t in tokens if t >= spot.least_tokens)


def _carry_out(planner: ReplicaIdlePlanner, commands: list[Command], trains_at: float, load: dict[str, int]) -> None:
    """Answer commands as a fleet in which everything works."""
    for command in commands:
        if isinstance(command, LeaveBalancer):
            load.pop(command.replica, None)
            _carry_out(planner, planner.left(command.replica), trains_at, load)
        elif isinstance(command, TrySleep):
            _carry_out(planner, planner.slept(command.replica), trains_at, load)
        elif isinstance(command, StartTraining):
            planner.training(command.replica, trains_at)
