"""Which versions of the drafter a spot worker holds, what moves one of them to another, and their checksums.

All spot workers of a run hold the same versions. What a worker is training is not among them: it is its own, and
becomes part of the next candidate when it is merged with the others'. Parameters of a version are replaced, never
written to.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer
from verl_tlt.drafter.train import AVERAGE
from verl_tlt.messages.training import VERSIONS, Parameters, Resumed

INITIAL = "initial"
"""Key of the initial parameters in a checkpoint's `DrafterTrainer.state()`, which is the candidate's; absent where they
are the served ones."""


@dataclass(frozen=True)
class DrafterVersions:
    """The versions that all spot workers agree on: a pure state machine. A cell that is empty stays as it is.

    | Event | `candidate` | `served` | `exported` | `to_judge` |
    |---|---|---|---|---|
    | `merged(new)`: the workers agreed on it | new | | | yes |
    | `judged()`: it was scored, the gate decides | | | | no |
    | `export()`: it is about to be published | | | the candidate | |
    | `published()` | | the exported one, or else the candidate | none | no, unless the candidate is newer |
    | `reverted(which)`: it is given up | the served or the initial one | | none | no |
    | `resumed(candidate, initial)`, a checkpoint's | the checkpoint's | | | yes, unless it is the served one |

    `initial` never changes but when a run is resumed. A run begins with one version in all three roles.
    """

    candidate: Parameters  # the newest one: the served one, or one that was merged since
    served: Parameters  # the one that engines draft with
    initial: Parameters  # the one that the run started with
    exported: Parameters | None = None  # a candidate that is about to be published; None: none is
    to_judge: bool = False  # the candidate waits for a session that scores it for the gate

    def merged(self, candidate: Parameters) -> DrafterVersions:
        return replace(self, candidate=candidate, to_judge=True)

    def judged(self) -> DrafterVersions:
        return replace(self, to_judge=False)

    def export(self) -> DrafterVersions:
        return replace(self, exported=self.candidate)

    def published(self) -> DrafterVersions:
        served = self.candidate if self.exported is None else self.exported
        return replace(self, served=served, exported=None, to_judge=self.to_judge and served is not self.candidate)

    def reverted(self, which: Literal["served", "initial"]) -> DrafterVersions:
        return replace(self, candidate=self.of(which), exported=None, to_judge=False)

    def resumed(self, candidate: Parameters, initial: Parameters) -> DrafterVersions:
        ahead = any(not np.array_equal(value, self.served[name]) for name, value in candidate.items())
        return replace(self, candidate=candidate, initial=initial, to_judge=ahead)

    def of(self, which: str) -> Parameters:
        return {name: getattr(self, name) for name in VERSIONS}[which]

    def copied(self) -> DrafterVersions:
        """A copy on its own memory: arrays out of Ray's object store are read-only and keep the whole object there."""
        return copy.deepcopy(self)  # in which one version in two roles stays one


def checksums(trainer: DrafterTrainer, versions: DrafterVersions) -> Resumed:
    """Checksums of what a worker holds now, to compare with those of a checkpoint's files."""
    return Resumed(
        steps=trainer.steps,
        candidate=checksum(trainer.averages()),
        served=checksum(versions.served),
        initial=checksum(versions.initial),
        moments=moments(trainer.optimizer.state_dict()),
    )


def moments(optimizer: Mapping[str, dict]) -> str:
    """Checksum of Adam's moments and step counts, from the optimizer's `state_dict()`."""
    states = optimizer["state"].items()
    return checksum({f"{i}.{name}": value for i, values in states for name, value in values.items() if name != AVERAGE})


def checksum(named: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """CRC-32 of names and numbers: a resumption waits for it, and a `fingerprint` takes thirteen times as long."""
    whole = 0
    for name in sorted(named):
        value = named[name]
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        whole = zlib.crc32(name.encode(), whole)
        whole = zlib.crc32(np.ascontiguousarray(array).reshape(-1).data.cast("B"), whole)
    return f"{whole:08x}"
