"""What the trainer calls outside its own process, as a protocol: rollout replicas, actor and spot workers.

Controller, watch and drafter update know only this, so they run in a test with a fleet made of plain objects.
`trainer.ray_fleet` is the real one. Every call here is bounded: it answers, or it raises `CallFailed`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from verl_tlt.config import TLTConfig
from verl_tlt.errors import TLTError
from verl_tlt.messages.rollout import DrafterFile, DrafterStatus, EngineStats
from verl_tlt.messages.training import (
    BufferStats,
    DrafterProvenance,
    MergeFacts,
    RolloutSampling,
    SessionResult,
    TappedStates,
)
from verl_tlt.speculation.costs.tables import LatencyTable

T = TypeVar("T", covariant=True)


class CallFailed(TLTError, RuntimeError):
    """A call into another process raised, found nobody there, or took longer than its bound."""

    def __init__(self, message: str, died: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.died = died
        """The other process is gone."""
        self.silent = silent
        """It has not answered within the bound, and may never."""


class Call(Protocol[T]):
    """A call that is under way."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""

    def result(self, timeout_s: float) -> T:
        """The answer.

        Raises:
            CallFailed: it raised, or there is none after `timeout_s` seconds.
        """


@dataclass(frozen=True)
class ReplicaInfo:
    """What the trainer knows of one rollout replica."""

    name: str
    """Its address, by which verl's load balancer knows it."""
    colocated: bool
    """It shares devices with the actor, so it has a spot worker on each of them; else it is standalone."""
    devices: int = 1
    """How many it has."""


@dataclass(frozen=True)
class SpotPlan:
    """How spot workers are made: once at the start, and again for one that died."""

    config: TLTConfig
    policy_dir: str
    """Visible on every node."""
    drafter: DrafterFile
    """The first one, float32."""
    sampling: RolloutSampling
    device: str


class DrafterStore:
    """The latest drafter, for rollout servers that start; a Ray actor under the job's `messages.rollout.store_name`.

    Servers start before the first training step, and vLLM loads a drafter as it starts. Later versions are handed to
    every server directly (`Fleet.stage`).
    """

    def __init__(self, drafter: DrafterFile) -> None:
        self._drafter = drafter

    def latest(self) -> DrafterFile:
        """The drafter a starting server should load."""
        return self._drafter

    def put(self, drafter: DrafterFile) -> None:
        """Replace it."""
        self._drafter = drafter


class Fleet(Protocol):
    """Replicas by name, and the calls to servers, balancer, actor and spot workers."""

    @property
    def replicas(self) -> Mapping[str, ReplicaInfo]:
        """By name."""

    # ------------------------------------------------------------------ rollout servers and their balancer

    def inflight(self) -> dict[str, int]:
        """Requests in flight by replica, of those that are in the load balancer."""

    def leave(self, name: str) -> None:
        """Take a replica out of the load balancer."""

    def rejoin(self, names: Collection[str]) -> None:
        """Put replicas back into the load balancer; those that are in it already stay as they are."""

    def try_sleep(self, name: str, keep_weights: bool) -> bool:
        """Have a server sleep if nothing runs on it and nothing is on its way; False: it serves on."""

    def wake_up(self, name: str) -> None:
        """Have a server that sleeps with its weights serve again."""

    def disable_drafting(self, names: Collection[str], at_once: bool) -> None:
        """These replicas, and no others, decode without drafts from the next weight sync on.

        Args:
            names: replicas.
            at_once: from now on instead; no engine has any work.
        """

    def stage(self, drafter: DrafterFile) -> None:
        """Hand a published drafter to every server, on every node; and to servers that start later."""

    def drafter_statuses(self) -> dict[str, DrafterStatus]:
        """Which drafter each engine has loaded."""

    def engine_stats(self) -> dict[str, EngineStats]:
        """What each engine did since it was last asked; engines without speculation are left out."""

    def calibrate(self) -> LatencyTable:
        """Measure on one replica what engine steps cost, and tell all of them."""

    def close(self) -> None:
        """The run is over: every server, on every node, ends its engine and clears away what it put there."""

    # ------------------------------------------------------------------ actor and spot workers

    def start_spot(self, aux_layers: Sequence[int], resume_from: Path | None) -> str | None:
        """Install the tap and start spot workers, one for each device of a colocated replica.

        Returns:
            None, or one sentence why there is no tap.
        """

    def workers(self) -> list[str]:
        """Replicas that have spot workers. The other methods address all of a replica's workers by its name."""

    def take(self, train_next: bool, tokens: int) -> list[TappedStates]:
        """What the tap captured of the last old-log-prob forward, on each rank of the actor.

        Args:
            train_next: the drafter will be trained again, so the next weight sync is to bring the verifier weights.
            tokens: to capture for each worker in the next one.
        """

    def hand_over(self, step: int, taken: Sequence[TappedStates]) -> dict[str, Call[BufferStats]]:
        """Send what was taken to the spot workers; does not wait for the copies."""

    def warm_up(self) -> dict[str, Call[object]]:
        """Have spot workers rehearse on their devices, not in use yet; empty where there is nothing to warm up."""

    def train(self, name: str) -> Call[SessionResult]:
        """Start a session on a replica's spot workers."""

    def stop(self, name: str) -> None:
        """Ask them to end after their micro-batch; does not wait."""

    def restart(self, names: Collection[str]) -> None:
        """Kill these replicas' spot workers and start others in their places; does not wait for them."""

    def first_done(self, calls: Mapping[str, Call[SessionResult]], timeout_s: float) -> list[str]:
        """Wait until at least one of these calls is done; those that are, or nothing after `timeout_s` (0: a look)."""

    def merge(self, names: Sequence[str]) -> MergeFacts:
        """Average what these workers learned, and have all workers adopt the result as the new candidate."""

    def keep_as_served(self) -> None:
        """What was exported is published: every worker marks it as the served version."""

    def revert(self, which: Literal["served", "initial"]) -> None:
        """Every worker goes back to the served or the initial drafter."""

    def export(self, version: int, dtype: str, acceptance: Sequence[float]) -> DrafterFile | None:
        """The candidate as engines load it; None: its numbers are not finite in that dtype."""

    def save(self, directory: Path, provenance: DrafterProvenance) -> Call[None]:
        """Write the served drafter and its training state, atomically."""
