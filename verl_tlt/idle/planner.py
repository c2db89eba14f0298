"""When may idle devices train the drafter? A pure state machine: observations in, commands out.

One replica at most leaves the rollout at a time, the first of the spot trainer's node that has nothing to decode while
another one still decodes:

    SERVES ──leave──▶ asked to sleep ──▶ ASLEEP ──train──▶ TRAINS ──stop──▶ ASLEEP
      ▲                   │ it has requests                                    │
      └───────────────────┴───────────────── wake up, when more prompts come ──┘

* No replica leaves while work may still arrive: a pending request, an open agent loop, or a refill of the batch.
* A replica leaves after it carried its share of this phase and has been empty for `settle_s`, if another one is busy.
* The load may miss a request that was on its way when the replica left the load balancer. The server then refuses to
  sleep and serves on; it is asked again after a pause.
* The weight sync after the phase wakes every replica up and puts it back, however the phase ended.

Times are seconds of one monotonic clock. `trainer.watch` carries the commands out and reports what came of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

RETRY_S = 2.0
"""Seconds before a server that refused to leave is asked again. Its request takes time, and each question keeps new
requests out for a moment."""
LEAST_SHARE = 0.5
"""Part of its fair share of the requests that a replica must have held at once before it may leave. Before dispatch all
replicas are empty, and routing is not even, so an empty replica may simply not have got its requests yet."""


@dataclass(frozen=True)
class ModeRule:
    """How one of verl's trainer modes differs for TLT; plain data, which the doctor reads, too."""

    idle: Literal["replicas", "trainer"]
    """Whose idle time trains the drafter: a replica that has finished while others decode, or the trainer's devices
    while they wait for samples."""
    recall: bool = False
    """The sampler may send more groups at any moment, so the replica that left keeps its weights (on the host) and is
    called back before they are sent. Elsewhere the planner knows beforehand, and no replica leaves."""


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
    """What is to be done with a replica.

    leave   take it out of the load balancer and ask its server to sleep: report `slept`, `refused` or `failed`
    train   start a session on it: report `training`, and later `ended`
    rejoin  put it back into the load balancer
    """

    do: Literal["leave", "train", "rejoin"]
    replica: str


@dataclass(frozen=True)
class PendingWork:
    """What the trainer knows about work still to come in a sampling phase."""

    pending: int = 0  # groups that no agent loop has taken up yet
    more: bool = False
    """An agent loop may send another turn, or sampling may still ask for more groups (DAPO filtering, failed ones)."""


@dataclass(frozen=True)
class Look:
    """What the fleet looks like at one moment."""

    now: float
    inflight: Mapping[str, int]  # requests by replica, of those in the load balancer
    work: PendingWork = PendingWork()
    ready: bool = True  # a session could begin: the spot trainer is up and has enough to train on


@dataclass(frozen=True)
class IdleTime:
    """Idle time of one phase, and what was made of it; seconds."""

    idle_s: Mapping[str, float]
    """By replica, from its last request until the last of all; of the trainer's devices: the wait for samples."""
    trained_s: float  # of training sessions within it
    end: float  # when the last request of all had finished (the planner's clock): all idle time ends there
    failures: int = 0  # replicas that did not say whether they sleep or serve
    lost: int = 0  # times that the load balancer no longer knew a replica that had not left it


class State(Enum):
    """Where a replica stands; only one that SERVES is in the load balancer."""

    SERVES = auto()
    LEAVES = auto()
    ASLEEP = auto()
    TRAINS = auto()


@dataclass
class _Replica:
    state: State = State.SERVES
    inflight: int = 0
    most_inflight: int = 0  # in this phase
    empty_since: float | None = None
    retry_at: float = -math.inf
    stays: bool = False  # it was called back or failed, and does not leave in this phase any more
    earlier_idle_s: float = 0.0  # before it was called back


@dataclass
class _Sessions:
    begun: float | None = None
    stretches: list[tuple[float, float]] = field(default_factory=list)
    over: bool = False  # the epochs are used up, or the session failed: there is no other in this phase

    def seconds(self, now: float, end: float) -> float:
        """Seconds of all sessions before `end`; a session that still runs counts until `now`."""
        stretches = list(self.stretches)
        if self.begun is not None:
            stretches.append((self.begun, now))
        return sum(max(0.0, min(stop, end) - start) for start, stop in stretches)


class IdlePlanner:
    """Decides for one sampling phase which replica leaves, trains and comes back.

    `expected_requests` are in flight at once over all `replicas`, of which `candidates` may leave.
    """

    def __init__(
        self,
        replicas: Sequence[str],
        candidates: Collection[str],
        *,
        expected_requests: int,
        settle_s: float,
    ) -> None:
        self._replicas = {name: _Replica() for name in replicas}
        self._candidates = frozenset(candidates)
        fair_share = expected_requests / max(1, len(replicas))
        self._least_inflight = max(1, math.ceil(LEAST_SHARE * fair_share))
        self._settle_s = settle_s
        self._sessions = _Sessions()
        self._all_empty_since: float | None = None
        self._end: float | None = None  # when sampling was over
        self._failures = 0
        self._lost = 0

    # ------------------------------------------------------------------ observations

    def observe(self, look: Look) -> list[Command]:
        """Take one look; returns what is to be done."""
        if self._end is not None:
            return []
        for name, replica in self._replicas.items():
            self._note_load(replica, look.inflight.get(name, 0), look)
        self._note_all_empty(look)
        lost = [name for name, r in self._replicas.items() if r.state is State.SERVES and name not in look.inflight]
        self._lost += len(lost)
        commands = [Command("rejoin", name) for name in lost]
        leaves = self._replica_to_leave(look, lost)
        if leaves is not None:
            self._replicas[leaves].state = State.LEAVES
            commands.append(Command("leave", leaves))
        return commands

    def _note_load(self, replica: _Replica, inflight: int, look: Look) -> None:
        replica.inflight = inflight
        replica.most_inflight = max(replica.most_inflight, inflight)
        if replica.state is not State.SERVES:
            return
        if inflight or look.work.pending or not replica.most_inflight:
            replica.empty_since = None
        elif replica.empty_since is None:
            replica.empty_since = look.now

    def _note_all_empty(self, look: Look) -> None:
        work = look.work.pending or any(replica.inflight for replica in self._replicas.values())
        seen = any(replica.most_inflight for replica in self._replicas.values())
        if work or not seen:
            self._all_empty_since = None
        elif self._all_empty_since is None:
            self._all_empty_since = look.now

    def _replica_to_leave(self, look: Look, lost: Sequence[str]) -> str | None:
        """The first replica that may leave now; None: no replica may."""
        if not look.ready or self._sessions.over:
            return None
        if look.work.pending or look.work.more:
            return None
        replicas = self._replicas.values()
        one_is_away = any(r.state is not State.SERVES and not r.stays for r in replicas)
        one_is_busy = any(r.state is State.SERVES and r.inflight for r in replicas)
        if one_is_away or not one_is_busy:
            return None
        for name, replica in self._replicas.items():
            if name in self._candidates and name not in lost and self._may_leave(replica, look.now):
                return name
        return None

    def _may_leave(self, replica: _Replica, now: float) -> bool:
        """Whether this replica serves, has done its share of the phase, and has been empty for long enough."""
        if replica.state is not State.SERVES or replica.stays or now < replica.retry_at:
            return False
        if replica.empty_since is None or replica.most_inflight < self._least_inflight:
            return False
        return now - replica.empty_since >= self._settle_s

    # ------------------------------------------------------------------ what came of the commands

    def slept(self, name: str) -> list[Command]:
        """The server holds no request and sleeps; it trains unless sampling has ended."""
        self._replicas[name].state = State.ASLEEP
        return [Command("train", name)] if self._end is None else []

    def refused(self, name: str, now: float) -> list[Command]:
        """The server has requests and serves on: back into the load balancer, asked again after a pause."""
        replica = self._replicas[name]
        replica.state = State.SERVES
        replica.empty_since = None  # the server also counts requests that the load balancer no longer shows
        replica.retry_at = now + RETRY_S
        return [Command("rejoin", name)] if self._end is None else []  # after the end the weight sync does it

    def failed(self, name: str) -> None:
        """The server did not say whether it sleeps, or serves again.

        It stays out of the load balancer until the weight sync, which opens every gate.
        """
        self._failures += 1
        replica = self._replicas[name]
        replica.state = State.ASLEEP
        replica.stays = True

    def training(self, name: str, now: float) -> None:
        self._replicas[name].state = State.TRAINS
        self._sessions.begun = now

    def ended(self, now: float, *, over: bool) -> None:
        """The session has ended; `over`: by itself or by a failure, so that there is no other in this phase."""
        if self._sessions.begun is not None:
            self._sessions.stretches.append((self._sessions.begun, now))
        self._sessions.begun = None
        if over:
            self._sessions.over = True
        for replica in self._replicas.values():
            if replica.state is State.TRAINS:
                replica.state = State.ASLEEP

    def recall(self) -> str | None:
        """More requests are about to be sent: the replica that has to serve again, whose session was stopped.

        The idle time of the others begins anew, so that none leaves while those requests are on their way.
        """
        for replica in self._replicas.values():
            if replica.state is State.SERVES:
                replica.empty_since = None
        for name, replica in self._replicas.items():
            if replica.state is State.ASLEEP and not replica.stays:
                return name
        return None

    def awake(self, name: str, now: float) -> list[Command]:
        """The replica serves again, and does not leave in this phase any more."""
        replica = self._replicas[name]
        if replica.empty_since is not None:
            replica.earlier_idle_s += now - replica.empty_since
        replica.empty_since = None
        replica.state = State.SERVES
        replica.stays = True
        return [Command("rejoin", name)]

    # ------------------------------------------------------------------ the end

    def end(self, now: float) -> None:
        """Sampling is over; nothing leaves or starts from here on."""
        if self._end is None:
            self._end = now

    def state(self, name: str) -> State:
        return self._replicas[name].state

    def idle_time(self, now: float) -> IdleTime:
        """The phase so far; final once `end` was called and the session has ended."""
        if self._all_empty_since is not None:
            end = self._all_empty_since
        elif self._end is not None:
            end = self._end
        else:
            end = now
        idle_s = {}
        for name, replica in self._replicas.items():
            open_s = 0.0 if replica.empty_since is None else max(0.0, end - replica.empty_since)
            idle_s[name] = replica.earlier_idle_s + open_s
        trained_s = self._sessions.seconds(now, end)
        return IdleTime(idle_s, trained_s, end, self._failures, self._lost)


class TrainerIdlePlanner(IdlePlanner):
    """Decides during one wait of the trainer for samples: train on its devices once it has lasted `settle_s`.

    In `separate_async` the trainer's devices are idle from the moment it asks for samples until they are there. They
    serve no requests meanwhile. Samples that are there already cost nothing, hence `settle_s`.
    """

    def __init__(self, device: str, *, begin: float, settle_s: float) -> None:
        super().__init__([device], [device], expected_requests=0, settle_s=settle_s)
        self._device = device
        self._begin = begin
        replica = self._replicas[device]
        replica.state = State.ASLEEP
        replica.empty_since = begin

    def observe(self, look: Look) -> list[Command]:
        if self._end is not None or look.now - self._begin < self._settle_s:
            return []
        if not look.ready or self._sessions.over or self.state(self._device) is State.TRAINS:
            return []
        return [Command("train", self._device)]
