"""Files and folders on whatever disk the user has: replaced atomically, where the disk can rename."""

import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from verl_tlt.errors import TLTError

CONFIG = "config.json"
"""The file of a model's folder that is written last and removed first: a folder without it holds no model."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HELD: list[IO[str]] = []
"""Locks of this process's private folders, held until it ends."""
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EROFS)
"""What mounts answer that do not know `fsync`."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path, mode: int = 0o664) -> Iterator[BinaryIO]:
    """Yield a new file that is given the name `path` when the block ends, and is removed when it raises.

    An `OSError` names a file: `path`, if it is of writing to it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `target` when the block ends, and is removed when it raises.

    It lies beside `target`. A process that is killed inside the block leaves a `.NAME.new-*`, which nothing reads; one
    that is killed between the two renames leaves the old folder as `.NAME.old-*`. On a mount that cannot rename folders
    the files are copied one by one. If `target` is a symbolic link, the folder it points to is replaced. A `TLTError`
    names the folder that could not be written.
    """
    target = Path(os.path.realpath(target) if os.path.islink(target) else os.path.abspath(target))
    unique = secrets.token_hex(4)
    draft = target.parent / f".{target.name}.new-{unique}"
    old = target.parent / f".{target.name}.old-{unique}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        for path in (*draft.rglob("*"), draft):
            _flush(path)
        _swap(draft, target, old)
        _flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TLTError(f"{target} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _swap(draft: Path, target: Path, old: Path) -> None:
    """Rename `target` to `old` and `draft` to `target`; where folders cannot be renamed, copy the files of `draft`."""
    try:
        if os.path.lexists(target):  # a folder that holds something cannot be renamed over
            target.rename(old)
        draft.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        if error.errno in _FULL:
            raise
        _copy_files(draft, target)


def _copy_files(draft: Path, target: Path) -> None:
    """Put the files of `draft` into `target` in place of what is there, `config.json` last."""
    remove_model(target)
    for file in sorted(draft.rglob("*"), key=lambda file: file == draft / CONFIG):
        if file.is_file():
            place = target / file.relative_to(draft)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def remove_model(folder: Path) -> None:
    """Remove a model's folder, `config.json` first, so that a kill meanwhile leaves nothing that could be loaded."""
    with suppress(OSError):
        (folder / CONFIG).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    """Have what was written survive a power failure, as far as the mount can do that."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder and error.errno not in _CANNOT_FLUSH:
            raise


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that are left on the disk of `path`; None: the mount does not tell, as those of object stores."""
    try:
        disk = shutil.disk_usage(path)
    except OSError:
        return None
    return disk.free if disk.total else None


def check_writable(directory: str | os.PathLike[str], key: str) -> None:
    """Raise a TLTError, which names `key`, where no file can be made in a directory that may have to be made itself."""
    path = Path(os.path.abspath(expanded(directory)))
    existing = next(part for part in (path, *path.parents) if os.path.lexists(part))
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".verl-tlt-") as made:
            (Path(made) / "file").write_bytes(b"\0")
    except OSError as error:
        raise TLTError(f"{key}={directory} cannot be written to: {error.strerror or error}.") from error


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with `~` filled in; a TLTError where no home directory is known, as for a user id without an account."""
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise TLTError(f"{full} is in a home directory, and this user has none: set HOME, or give a path without ~.")
    return Path(full)


def matching(path: str) -> list[str]:
    """What a path means to verl's datasets, which read `~` as the home directory, and patterns: paths, in order."""
    return sorted(glob.glob(os.path.expanduser(path)))


def private_dir(name: str) -> Path:
    """Make a temporary directory (0700) that this process has until it ends, and remove those of processes that ended.

    It is the first of `name-0`, `name-1`, ... that no living process has, so the next process with this `name` gets the
    same path. On a file system without locks it is a new one each time, and a killed process's stays.
    """
    place = Path(tempfile.gettempdir(), f"verl-tlt-{os.getuid()}")
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        path, lock = _first_free(place, name)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, exist_ok=True)
        _HELD.append(lock)
        _remove_abandoned(place)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="verl-tlt-"))
    return path


def _first_free(place: Path, name: str) -> tuple[Path, IO[str]]:
    """The first of `name-0`, `name-1`, ... in `place` that no living process has, and its lock, which we now have."""
    number = 0
    while True:
        lock = _locked(place / f"{name}-{number}.lock")
        if lock is not None:
            return place / f"{name}-{number}", lock
        number += 1


def _remove_abandoned(place: Path) -> None:
    """Remove the private directories in `place` of processes that ended."""
    for lock in place.glob("*.lock"):
        directory = lock.with_suffix("")
        if directory.exists():
            free = _locked(lock)
            if free is not None:
                shutil.rmtree(directory, ignore_errors=True)
                free.close()


def _locked(path: Path) -> IO[str] | None:
    """A file that this process has locked; None: another one has, or one of another machine may have."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.seek(0)
    written = file.read().split()
    ours = _names_of_this_machine()
    if written and not set(written) & set(ours):  # machines may share the folder, and not its locks
        file.close()
        return None
    if written != ours:
        file.truncate(0)
        file.write("\n".join(ours))
        file.flush()
    return file


def _names_of_this_machine() -> list[str]:
    """Its host name, which a container may change at each start, and the id of its kernel, which a reboot changes."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(BOOT_ID.read_text().strip())
    return names
