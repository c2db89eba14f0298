"""The drafter's files on a rollout server's node, from which its engine processes load them.

The server of each node stages in a private directory; its engine processes find that through the environment.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from verl_tlt.files.ownership import check_private

DIRECTORY = "TLT_DRAFTER_DIR"
"""Environment variable of a server and its children: where this node's drafter is staged."""
WEIGHTS = "model.safetensors"


def staged_weights() -> Path:
    """The weights that the server of this node staged; a `TLTError` where others may have written them."""
    directory = Path(os.environ[DIRECTORY])
    check_private(directory)
    return directory / WEIGHTS


def stage(config: str, weights: bytes, directory: Path) -> None:
    """Write a drafter so that a reader finds the old or the new one, never half of either; files are private (0600).

    A `TLTError` where the directory is another user's or open to others.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    # The weights come last: whoever reads the new weights also finds the configuration they need.
    for name, content in (("config.json", config.encode()), (WEIGHTS, weights)):
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")  # mkstemp creates with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, directory / name)
