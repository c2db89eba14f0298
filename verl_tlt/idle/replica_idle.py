"""When may idle devices train the drafter? A pure state machine: observations in, commands out.

    BUSY ──leave──▶ DRAINING ──try_sleep──▶ IDLE ──train──▶ TRAINING ──stop──▶ IDLE
      ▲                │ refused            (no answer: IDLE until the weight sync)
      └────rejoin──────┴────────────────── wake_up and rejoin: recalled ─────────┘

The policy:
* No replica leaves while work can still arrive: a pending request, an open agent loop, or a refill.
* A replica leaves when it carried its share in this phase, has been empty for `settle_s`, and has enough to train on.
* One that serves always stays, with a request running on it: the last one never leaves, and when the last request of
  the phase finishes that is the end of sampling, not a bubble.
* The load shown here may miss a request that was on its way when the replica left the balancer; the server then
  refuses to sleep, the replica goes back, and is asked again only after a growing pause.
* Where the sampler may ask for more groups at any moment, replicas that have left are called back first.

The weight sync after the phase wakes every replica up and puts it back, however the phase ended. Observations and
answers are method calls from one thread at a time, with times in seconds from any one monotonic clock; they return the
commands to carry out next, so that none waits for the next look. `trainer.watch` carries them out.
"""

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FIRST_RETRY_S = 0.5
"""Pause after a first refusal: a request that slipped in decodes about this long or longer; asking closes the gate."""
LONGEST_RETRY_S = 8.0
"""Longest pause, up to which it doubles: a bubble worth using is longer, so one that opens late is still used."""
LEAST_SHARE = 0.5
"""Part of its fair share a replica must have carried at once: before dispatch all are idle, and routing is not even."""
PATIENCE = 5
"""The longest pause between two looks, in shortest ones. A look costs round trips to the balancer: CPU time that the
engines want where they share a few cores with it."""


@dataclass(frozen=True)
class ModeRule:
    """How one of verl's trainer modes differs for TLT; plain data, which the doctor reads, too."""

    idle: Literal["replicas", "trainer"]
    """Whose idle time trains the drafter: replicas that run dry while others decode, or the trainer's devices while
    they wait for samples."""
    recall: bool = False
    """The sampler may send more groups at any moment, so a replica that leaves keeps its weights (on the host) and is
    called back before they are sent. Elsewhere the planner knows beforehand and no replica leaves."""


MODE_RULES = {
    # One batch at a time; no replica leaves while the sampler may replace groups of it.
    "sync": ModeRule("replicas"),
    # The next batch is decoded already, and failed or stale groups are replaced while the trainer waits.
    "colocate_async": ModeRule("replicas", recall=True),
    # Rollout has replicas of its own, which are always busy.
    "separate_async": ModeRule("trainer"),
}
"""Rules by `trainer.v1.trainer_mode`."""


class Command(NamedTuple):
    """What the fleet is to do with a replica; the planner is told what came of it by one of these methods.

    leave       take it out of the load balancer: `left`, or `failed`
    try_sleep   ask its server to close its gate and sleep: `slept`, `refused` (it still serves), or `failed`
    train       start its spot worker: `training`, later `stopped` or `failed`
    stop        stop its spot worker, which may have only just been started: `stopped` or `failed`
    wake_up     ask the sleeping server to serve again with the weights it has: `awake`, or `failed`
    rejoin      put it back into the load balancer
    """

    do: Literal["leave", "try_sleep", "train", "stop", "wake_up", "rejoin"]
    replica: str


def next_pause(pause: float, shortest: float, changed: bool) -> float:
    """Seconds until the next look: the shortest after a change, half as long again after none."""
    return shortest if changed else min(1.5 * pause, PATIENCE * shortest)


@dataclass(frozen=True)
class PhaseAccount:
    """Idle time of one sampling phase and what was trained in it. Dicts are keyed by replica; times in seconds."""

    bubble_s: Mapping[str, float]
    """Seconds from a replica's last request until the last of all; on the trainer's devices: its wait for samples."""
    used_s: Mapping[str, float]  # part of `bubble_s` in which the replica's spot worker trained
    stop_s: Mapping[str, float]  # seconds from the stop command until the worker answered
    failures: int  # sessions that failed at any stage
    end: float  # when the last request of all had finished (the planner's clock): where every bubble ends
    lost: int = 0  # times the load balancer no longer knew a replica that had not left it


class State(enum.Enum):
    """Where a replica stands; only a BUSY one is in the load balancer."""

    BUSY = "busy"
    DRAINING = "draining"
    IDLE = "idle"
    TRAINING = "training"


@dataclass
class _Replica:
    state: State = State.BUSY
    inflight: int = 0
    peak: int = 0
    idle_since: float | None = None
    retry_at: float = -math.inf
    refusals: int = 0
    over: bool = False  # had its session in this phase, or failed
    lost: bool = False  # did not say that it sleeps, or that it serves again
    started: bool = False  # told to train and not known to have ended
    train_from: float | None = None
    train_to: float | None = None
    stop_s: float | None = None
    earlier_bubble_s: float = 0.0  # of a bubble that a recall ended
    earlier_used_s: float = 0.0

    def seconds(self, now: float, end: float) -> tuple[float, float]:
        """(bubble, part of it in which it trained) so far, where bubbles end at `end`."""
        start = end if self.idle_since is None else self.idle_since
        train_from = now if self.train_from is None else self.train_from
        train_to = now if self.train_to is None else self.train_to
        bubble = self.earlier_bubble_s + max(0.0, end - start)
        used = self.earlier_used_s + max(0.0, min(train_to, end) - max(train_from, start))
        return bubble, used


class ReplicaIdlePlanner:
    """Decides for one sampling phase which replicas leave, sleep, train and come back.

    `expected_requests` are in flight at once, over all replicas; a replica must have been empty for `settle_s` before
    it is asked to leave; `spot_workers` may train now and have enough to train on (None: all).
    """

    def __init__(
        self,
        replicas: Sequence[str],
        *,
        expected_requests: int,
        settle_s: float,
        spot_workers: Collection[str] | None = None,
    ) -> None:
        self._replicas = {name: _Replica() for name in replicas}
        self._workers = frozenset(replicas if spot_workers is None else spot_workers)
        self._need = max(1, math.ceil(LEAST_SHARE * expected_requests / max(1, len(replicas))))
        self._settle_s = settle_s
        self._more_may_arrive = True
        self._served = False  # by a BUSY replica with requests; a DRAINING one does not count, whatever it holds
        self._last_request: float | None = None  # since when nothing runs anywhere
        self._ended: float | None = None
        self._failures = self._lost = 0

    def observe(self, now: float, inflight: Mapping[str, int], pending: int, more: bool = False) -> list[Command]:
        """Take one look at the fleet, at `now`.

        A replica that is missing in `inflight`, requests by replica, has left the balancer or is put back into it.
        `pending` requests are on no replica yet; `more`: agent loops or the trainer may send others.
        """
        if self._ended is not None:
            return []
        self._more_may_arrive = bool(pending) or more
        for name, r in self._replicas.items():
            r.inflight = inflight.get(name, 0)
            r.peak = max(r.peak, r.inflight)
            if r.state is not State.BUSY:
                continue
            if r.inflight or pending or not r.peak:
                r.idle_since = None
            elif r.idle_since is None:
                r.idle_since = now
        self._watch_end(now, pending)
        commands: list[Command] = []
        # Kept until the next look, since hundreds may leave at one; what leaves below has no request.
        self._served = any(r.state is State.BUSY and r.inflight > 0 for r in self._replicas.values())
        for name, r in self._replicas.items():
            if r.state is State.BUSY and name not in inflight:  # the load balancer has lost it
                self._lost += 1
                commands.append(Command("rejoin", name))
            elif r.state is State.BUSY and self._may_leave(name, now):
                r.state = State.DRAINING
                commands.append(Command("leave", name))
        return commands

    def left(self, replica: str) -> list[Command]:
        """The replica is out of the balancer."""
        self._in(replica, State.DRAINING)
        if self._ended is not None:
            return []  # the trainer puts all to sleep; back with the weight sync
        if self._more_may_arrive or not self._served:  # that has changed since it was told to leave
            return self._busy(replica)
        return [Command("try_sleep", replica)]

    def slept(self, replica: str) -> list[Command]:
        """The server holds no request and sleeps; too late for a session if sampling has ended."""
        r = self._in(replica, State.DRAINING)
        r.state = State.IDLE
        if self._ended is not None:
            return []
        r.started = True
        return [Command("train", replica)]

    def refused(self, replica: str, now: float) -> list[Command]:
        """The server answered BUSY and serves on: back into the balancer, asked again after a growing pause."""
        r = self._in(replica, State.DRAINING)
        r.retry_at = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0**r.refusals)
        r.refusals += 1
        r.idle_since = None  # the server knows better than the load shown
        return [] if self._ended is not None else self._busy(replica)  # after the end: back with the weight sync

    def training(self, replica: str, now: float) -> None:
        r = self._in(replica, State.IDLE)
        if r.started:  # else a stop overtook this report
            r.state, r.train_from = State.TRAINING, now

    def stopped(self, replica: str, now: float) -> None:
        """The spot worker ended, by itself (its epochs are used up) or as it was told to; the replica sleeps on."""
        r = self._replicas[replica]
        if self._ended is not None:
            r.stop_s = now - self._ended
        if r.started:
            self._close(r, now)

    def failed(self, replica: str, now: float) -> None:
        """Something raised, or did not answer, at any stage: no further session for this replica in this phase.

        It stays out of the balancer until the weight sync, which opens every gate: one that sleeps may have no weights,
        and one that was asked to sleep may have closed its gate, or may yet.
        """
        r = self._replicas[replica]
        self._failures += 1
        if r.state is State.DRAINING or (r.state is State.IDLE and not r.started):
            r.state, r.lost = State.IDLE, True
        self._close(r, now)

    def recall(self) -> list[Command]:
        """More requests are about to be sent: replicas that have left stop training, wake up and come back.

        The idle time of the others starts again, so that none leaves while those requests are on their way.
        """
        if self._ended is not None:
            return []
        commands: list[Command] = []
        for name, r in self._replicas.items():
            if r.lost:  # to wait for it again and again would hold up every request
                continue
            if r.state in (State.IDLE, State.TRAINING):
                commands += [Command("stop", name)] if r.started else []
                commands.append(Command("wake_up", name))
            else:
                r.idle_since = None
        return commands

    def awake(self, replica: str, now: float) -> list[Command]:
        """The replica serves again; it has had its session in this phase."""
        r = self._in(replica, State.IDLE)
        r.earlier_bubble_s, r.earlier_used_s = r.seconds(now, now)
        r.over, r.idle_since = True, None
        r.state = State.BUSY
        return [Command("rejoin", replica)]

    def end(self, now: float) -> list[Command]:
        """Sampling is over: stop every worker that was started. Nothing leaves or starts from here on."""
        if self._ended is None:
            self._ended = now
        return [Command("stop", name) for name, r in self._replicas.items() if r.started]

    def state(self, replica: str) -> State:
        return self._replicas[replica].state

    def account(self, now: float) -> PhaseAccount:
        """The phase so far; final once `end` was called and the workers stopped."""
        end = self._last_request if self._last_request is not None else self._ended if self._ended is not None else now
        seconds = {name: r.seconds(now, end) for name, r in self._replicas.items()}
        return PhaseAccount(
            bubble_s={name: bubble for name, (bubble, _) in seconds.items()},
            used_s={name: used for name, (_, used) in seconds.items()},
            stop_s={name: r.stop_s for name, r in self._replicas.items() if r.stop_s is not None},
            failures=self._failures,
            lost=self._lost,
            end=end,
        )

    def _may_leave(self, name: str, now: float) -> bool:
        r = self._replicas[name]
        settled = r.idle_since is not None and now - r.idle_since >= self._settle_s
        trains = name in self._workers and not r.over
        alone = not self._served  # this one is not among those that serve: it has no request
        stays = self._more_may_arrive or r.inflight or alone or r.peak < self._need or now < r.retry_at
        return trains and settled and not stays

    def _watch_end(self, now: float, pending: int) -> None:
        work = pending or any(r.inflight for r in self._replicas.values() if r.state in (State.BUSY, State.DRAINING))
        seen = any(r.peak for r in self._replicas.values())
        if work or not seen:
            self._last_request = None
        elif self._last_request is None:
            self._last_request = now

    def _busy(self, replica: str) -> list[Command]:
        r = self._replicas[replica]
        r.state = State.BUSY
        self._served = self._served or r.inflight > 0
        return [Command("rejoin", replica)]

    def _close(self, r: _Replica, now: float) -> None:
        """The session is over; the first ending counts."""
        r.over, r.started = True, False
        if r.state is State.TRAINING:
            r.state, r.train_to = State.IDLE, now

    def _in(self, name: str, state: State) -> _Replica:
        r = self._replicas[name]
        if r.state is not state:
            raise ValueError(f"Replica {name!r} is {r.state.value}, but was reported as if {state.value}.")
        return r


class TrainerIdlePlanner(ReplicaIdlePlanner):
    """Decides during one wait of the trainer which spot workers train: all that may, once it has lasted `settle_s`.

    In `separate_async` the trainer's devices are idle from the moment it asks for samples until they are there: to the
    planner they are replicas that sleep from the start. Samples that are there already cost nothing, hence `settle_s`.
    `spot_workers` have enough to train on.
    """

    def __init__(
        self, replicas: Sequence[str], *, begin: float, settle_s: float, spot_workers: Collection[str]
    ) -> None:
        super().__init__(replicas, expected_requests=0, settle_s=settle_s, spot_workers=spot_workers)
        self._begin = begin
        for r in self._replicas.values():
            r.state, r.idle_since = State.IDLE, begin

    def observe(self, now: float, inflight: Mapping[str, int], pending: int, more: bool = False) -> list[Command]:
        """Take one look; how much is in flight does not matter to devices that do not decode."""
        if self._ended is not None or now - self._begin < self._settle_s:
            return []
        starting = [n for n, r in self._replicas.items() if n in self._workers and not (r.started or r.over)]
        for name in starting:
            self._replicas[name].started = True
        return [Command("train", name) for name in starting]

    def recall(self) -> list[Command]:
        """Nothing: these replicas serve no requests."""
        return []
