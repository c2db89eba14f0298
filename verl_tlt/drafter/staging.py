"""The drafter's files on a rollout server's node, from which its engine processes load them.

A replica may span nodes. Each node has a server, which stages in a private directory, and engine processes, which are
its children and find that directory through the environment. Standard library only, as servers need no torch for it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from verl_tlt.ownership import check_private

DIRECTORY = "TLT_DRAFTER_DIR"
"""Environment variable of a server and its children: where this node's drafter is staged."""
WEIGHTS = "model.safetensors"


def staged_weights() -> Path:
    """The weights that the server of this node staged, for a process below it.

    Raises:
        KeyError: no server stages here.
        TLTError: others may have written what is there.
    """
    directory = Path(os.environ[DIRECTORY])
    check_private(directory)
    return directory / WEIGHTS


def stage(config: str, weights: bytes, directory: Path) -> None:
    """Write a drafter so that a reader finds the old or the new one, never half of either; files are private (0600).

    Raises:
        TLTError: the directory is there already, and another user's or open to others.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    # The weights come last: whoever reads the new weights also finds the configuration they need.
    for name, content in (("config.json", config.encode()), (WEIGHTS, weights)):
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")  # mkstemp creates with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, directory / name)
