"""Replace a directory in one step: whoever looks finds the old one or the new one, complete, and never a mixture."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target`; when the block ends it takes the name, when it raises it is removed.

    Files are flushed to disk before the name changes, so that a power cut cannot leave a complete name over empty
    files. A process killed inside the block leaves a `.NAME.new-*` directory that nothing reads.
    """
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.new-{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        yield draft
        for file in draft.iterdir():
            _flush(file)
        _flush(draft)
        _swap(draft, target)
        _flush(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _swap(draft: Path, target: Path) -> None:
    """Give `draft` the name `target`; what had the name is then called `draft`."""
    if not os.path.lexists(target):
        draft.rename(target)
    elif not _exchange(draft, target):
        # File systems without an exchange (NFS): for an instant no directory has the name; the old one still exists.
        aside = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
        target.rename(aside)
        try:
            draft.rename(target)
        except OSError:
            aside.rename(target)
            raise
        aside.rename(draft)


def _exchange(a: Path, b: Path) -> bool:
    """Linux's atomic exchange of two names (`renameat2`); False where the system or the file system lacks it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
