"""A drafter written to disk so that a reader finds the old or the new one, never half of either.

Standard library only: rollout servers call it, and they need no torch for it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def stage(config: str, weights: bytes, directory: Path) -> None:
    """Write a drafter so that a reader finds the old or the new one, never half of either; files are private (0600)."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The weights come last: a reader that sees the new weights also sees the configuration they need.
    for name, content in (("config.json", config.encode()), ("model.safetensors", weights)):
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")  # mkstemp creates with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, directory / name)
