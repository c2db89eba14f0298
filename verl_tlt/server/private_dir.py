"""A directory on this node that belongs to one process; if that process was killed, the next one removes it.

Two runs on one machine may have the same Ray job id and replica ranks: only the system's own temporary names keep their
files apart. A run that is killed cannot clean up. The owner therefore holds a file lock, which ends with its process,
and whoever comes later removes directories that nobody has locked. Standard library only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

OWNER = "owner.lock"


def make_private_dir(prefix: str) -> Path:
    """Make a temporary directory (0700) for this process, and remove those of this user's dead processes."""
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        _remove_if_unowned(owner)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(path / f".{OWNER}", os.O_CREAT | os.O_RDWR, 0o600)  # closed by nothing but the process's end
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(path / f".{OWNER}", path / OWNER)  # nobody ever finds it unlocked
    return path


def _remove_if_unowned(owner: Path) -> None:
    """Remove the directory of this lock file if this user made it and no process holds the lock."""
    try:
        # Others may give theirs a name like ours, or a link to something of ours.
        found = os.lstat(owner.parent)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
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
