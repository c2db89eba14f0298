"""Which versions of the drafter a spot worker holds, and what moves one of them to another: a pure state machine.

All spot workers of a run hold the same versions. What a worker is training is not among them: it is its own, and
becomes part of the next candidate when it is merged with the others'.

| Event | `candidate` | `served` | `initial` | `exported` | `to_judge` |
|---|---|---|---|---|---|
| start of the run | the first drafter | the first drafter | the first drafter | none | no |
| `merged(new)` | new | | | | yes |
| `judged()` | | | | | no |
| `export()` | | | | the candidate | |
| `published()` | | the exported one, or else the candidate | | none | no, unless the candidate is newer |
| `reverted(which)` | the served or the initial one | | | none | no |
| `resumed(candidate, initial)` | as saved | | as saved | | |

An empty cell stays as it is. The parameters of a version are replaced, never written to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_tlt.messages.training import VERSIONS, Parameters


@dataclass(frozen=True)
class DrafterVersions:
    """The versions that all spot workers agree on."""

    candidate: Parameters
    """The newest one: the served one, or one that was merged since and may be served."""
    served: Parameters
    """The one that engines draft with."""
    initial: Parameters
    """The one that the run started with."""
    exported: Parameters | None = None
    """A candidate that is about to be published; None: none is."""
    to_judge: bool = False
    """The candidate waits for a session that scores it for the gate."""

    @classmethod
    def start(cls, first: Parameters) -> DrafterVersions:
        """Of a run that begins with this drafter."""
        return cls(first, first, first)

    def merged(self, candidate: Parameters) -> DrafterVersions:
        """The workers agreed on a new candidate."""
        return replace(self, candidate=candidate, to_judge=True)

    def judged(self) -> DrafterVersions:
        """The candidate was scored: the gate decides."""
        return replace(self, to_judge=False)

    def export(self) -> DrafterVersions:
        """The candidate is about to be published; there may be a newer one when it is."""
        return replace(self, exported=self.candidate)

    def published(self) -> DrafterVersions:
        """The engines serve what was exported, or else the candidate."""
        served = self.candidate if self.exported is None else self.exported
        return replace(self, served=served, exported=None, to_judge=self.to_judge and served is not self.candidate)

    def reverted(self, which: Literal["served", "initial"]) -> DrafterVersions:
        """The candidate is given up."""
        return replace(self, candidate=self.of(which), exported=None, to_judge=False)

    def resumed(self, candidate: Parameters, initial: Parameters) -> DrafterVersions:
        """As a checkpoint has them, whose served drafter is the one that the run starts with."""
        return replace(self, candidate=candidate, initial=initial)

    def of(self, which: str) -> Parameters:
        """Candidate, served or initial version."""
        return {name: getattr(self, name) for name in VERSIONS}[which]

    def copied(self) -> DrafterVersions:
        """On memory of its own: arrays out of Ray's object store are read-only and keep the whole object there."""
        copies: dict[int, Parameters] = {}

        def copy(parameters: Parameters) -> Parameters:
            if id(parameters) not in copies:  # one version in two roles stays one
                copies[id(parameters)] = {name: np.array(value) for name, value in parameters.items()}
            return copies[id(parameters)]

        exported = None if self.exported is None else copy(self.exported)
        return replace(
            self, candidate=copy(self.candidate), served=copy(self.served), initial=copy(self.initial),
            exported=exported,
        )  # fmt: skip
