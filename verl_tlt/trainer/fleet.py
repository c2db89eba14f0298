"""What calls to the fleet answer, and how replicas and spot workers are described; no Ray in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from verl_tlt.config import TLTConfig
from verl_tlt.errors import TLTError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import RolloutSampling

T = TypeVar("T", covariant=True)


class CallFailed(TLTError, RuntimeError):
    """A call into another process raised, found no process there, or took longer than its bound."""

    def __init__(self, message: str, died: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.died = died  # the other process is gone
        self.silent = silent  # it has not answered within the bound, and may never


class Call(Protocol[T]):
    """A call that is under way."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""

    def result(self, timeout_s: float) -> T:
        """The answer, or `CallFailed` where it raised or there is none after `timeout_s` seconds."""

    def excused(self) -> bool:
        """Whether a failure says nothing about who serves now: it was replaced since, or is still starting."""


@dataclass(frozen=True)
class ReplicaInfo:
    """What the trainer knows of one rollout replica."""

    name: str
    """Its address, by which verl's load balancer knows it."""
    colocated: bool
    """It shares devices with the actor, so it has a spot worker on each of them; else it is standalone."""
    devices: int = 1


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

    Servers that run are handed later versions directly (`RayFleet.stage`).
    """

    def __init__(self, drafter: DrafterFile) -> None:
        self._drafter = drafter

    def latest(self) -> DrafterFile:
        """The drafter a starting server should load."""
        return self._drafter

    def put(self, drafter: DrafterFile) -> None:
        """Replace it."""
        self._drafter = drafter
