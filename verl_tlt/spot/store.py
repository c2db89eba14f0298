"""The published drafter as one value that travels: configuration, weights, version, fingerprint.

Servers exist before the first training step and vLLM wants a directory, so the trainer puts the first drafter into
a small named actor that each server asks while it starts. Later versions are handed to every server directly.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

STORE_NAME = "verl_tlt_drafter_store"


@dataclass(frozen=True)
class DrafterFile:
    """A drafter as vLLM loads it."""

    version: int
    """Counts publications; 0 is what the run started with."""
    config: str
    """Text of config.json."""
    weights: bytes
    """A safetensors file in the rollout's dtype, without embedding and head (vLLM shares the policy's)."""
    fingerprint: str
    """`verl_tlt.drafter.fingerprint` of the weights."""
    acceptance: tuple[float, ...] = ()
    """Conditional acceptance expected at each draft position, from held-out sequences; empty: unknown."""


def stage(drafter: DrafterFile, directory: Path) -> None:
    """Write a drafter so that a reader finds the old or the new one, never half of either; files are private (0600)."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The weights come last: a reader that sees the new weights also sees the configuration they need.
    for name, content in (("config.json", drafter.config.encode()), ("model.safetensors", drafter.weights)):
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")  # mkstemp creates with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, directory / name)


class DrafterStore:
    """Holds the latest drafter for servers that start; a Ray actor named `STORE_NAME` in the run's namespace."""

    def __init__(self, drafter: DrafterFile) -> None:
        self._drafter = drafter

    def latest(self) -> DrafterFile:
        """The drafter a starting server should load."""
        return self._drafter

    def put(self, drafter: DrafterFile) -> None:
        """Replace it."""
        self._drafter = drafter
