"""A lock for a folder that one process at a time may write to."""

import fcntl
import logging
from pathlib import Path
from typing import IO

from verl_tlt.errors import TLTError

logger = logging.getLogger(__name__)


def take_lock(file: Path, busy: str) -> IO[bytes]:
    """Lock `file`, which is created if need be, until the returned stream is closed or this process ends.

    Raises a `TLTError` with the sentence `busy` where another process holds the lock. A file system without locks is
    logged, and the stream is returned unlocked.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    stream = file.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise TLTError(busy) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): start one command at a time.", file, error.strerror)
    return stream
