"""A directory on this node that belongs to one process alone; where that died, the next one removes it.

Ray numbers jobs from one in every cluster, so two runs on one machine have the same job, and their replicas the same
ranks: only the system's own temporary names keep their files apart. Ray kills servers without a chance to clean up, so
a run that ends tells them before; one that is killed cannot. The owner therefore holds a file lock, which ends with the
process, and whoever comes later removes what is unlocked.
Standard library only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

OWNER = "owner.lock"


@dataclass(frozen=True)
class PrivateDir:
    """A private directory (0700); it is this process's as long as this process lives."""

    path: Path
    lock: int
    """Descriptor of the locked file; closed by nothing but the process's end."""

    def remove(self) -> None:
        """Nobody needs it any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_private_dir(prefix: str) -> PrivateDir:
    """Make a directory of our own, and remove those of this user's dead processes.

    Args:
        prefix: how such directories begin, below the system's temporary directory.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        if _is_ours(left.parent):
            _remove_unowned(left)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(path / f".{OWNER}", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(path / f".{OWNER}", path / OWNER)  # nobody ever sees it unlocked
    return PrivateDir(path, lock)


def _is_ours(directory: Path) -> bool:
    """Whether this user made it: others may give theirs a name like ours, or a link to something of ours."""
    try:
        found = os.lstat(directory)
    except OSError:  # gone meanwhile
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_unowned(owner: Path) -> None:
    try:
        lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or no lock of ours
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(owner.parent)
    except BlockingIOError:
        pass  # it is in use
    except OSError as error:
        logger.warning("%s, left by a process that is gone, could not be removed: %s", owner.parent, error)
    finally:
        os.close(lock)
