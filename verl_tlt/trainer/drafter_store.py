"""Where a rollout server finds the drafter while it starts.

Servers exist before the first training step and vLLM wants a directory, so the trainer puts the first drafter into
a small named actor that each server asks while it starts. Later versions are handed to every server directly.
"""

from __future__ import annotations

from verl_tlt.messages.rollout import DrafterFile


class DrafterStore:
    """Holds the latest drafter for servers that start; a Ray actor under the job's `store_name`."""

    def __init__(self, drafter: DrafterFile) -> None:
        self._drafter = drafter

    def latest(self) -> DrafterFile:
        """The drafter a starting server should load."""
        return self._drafter

    def put(self, drafter: DrafterFile) -> None:
        """Replace it."""
        self._drafter = drafter
