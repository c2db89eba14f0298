"""Who owns a file, on machines that others use too: checked before a file is read as ours or written to.

Below a directory that all users may write to (`/tmp`, a scratch disk, an open share) a file is trusted only if this
user or root owns each entry on the path to it; a file that all may write to is not trusted. Directories that only their
owner's group may write to are trusted.

A mount may show every file as everybody's and refuse `chmod` (gcsfuse, blobfuse, CIFS). What this user wrote there is
known by its seal (`seal`), and a user may say that such a mount is trusted (`TRUSTED_MOUNT`).
"""

import fcntl
import glob
import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from verl_tlt.errors import TLTError

logger = logging.getLogger(__name__)

OWNER = "owner.lock"
SEAL, KEY = "seal", "~/.config/verl-tlt/seal.key"
"""A file in a sealed directory, and the secret it is made with, readable for this user alone."""
TRUSTED_MOUNT = "TLT_TRUSTED_MOUNT"
"""Environment variable: a directory below which every file is believed, whatever its permissions."""


def _is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether a path, without links, is below the mount that the user trusts (`TRUSTED_MOUNT`)."""
    mount = os.environ.get(TRUSTED_MOUNT)
    return bool(mount) and Path(path).is_relative_to(os.path.realpath(str(mount)))


def other_owner(path: str | os.PathLike[str], also: int | None = None) -> str | None:
    """Why the content of `path` may be another user's, a sentence without its end; None: it is not, or is not there.

    `also` is the user id of one more owner to trust.
    """
    owners = {0, os.geteuid(), also}
    try:
        for entry in _entries(path):
            if _is_trusted(entry.parent):
                continue
            status, parent = os.lstat(entry), os.stat(entry.parent)
            if parent.st_mode & stat.S_IWOTH and status.st_uid not in owners:
                return f"{entry} belongs to user {status.st_uid}, and everybody may write to {entry.parent}"
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # links that lead in a circle, a directory of somebody else's
        return f"{error.filename} cannot be looked up ({error.strerror})"
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        return f"{path} is no ordinary file"
    return f"everybody may write to {path}" if mode & stat.S_IWOTH and not _is_trusted(os.path.realpath(path)) else None


def seal(directory: Path) -> None:
    """Note what this user wrote to a directory, where permissions cannot show it: a code over names and digests.

    Only the holder of this user's key can compute that code. Where the key cannot be kept private, nothing is noted.
    """
    files = [path for path in directory.rglob("*") if path.is_file()]
    if any(other_owner(file) for file in files) and (key := _seal_key(make=True)) is not None:
        (directory / SEAL).write_text(_code(key, directory))


def sealed(directory: Path) -> bool:
    """Whether all files of a directory are as this user wrote and sealed them, whoever might have changed them."""
    try:
        with os.fdopen(open_descriptor(directory / SEAL, os.O_RDONLY), "rb") as file:
            code = file.read(100)
        key = _seal_key(make=False)
        return key is not None and hmac.compare_digest(code, _code(key, directory).encode())
    except OSError:
        return False


def _code(key: bytes, directory: Path) -> str:
    digests = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        if path != directory / SEAL:
            with path.open("rb") as file:
                digests[str(path.relative_to(directory))] = hashlib.file_digest(file, "sha256").hexdigest()
    return hmac.new(key, json.dumps(digests).encode(), "sha256").hexdigest()


def _seal_key(make: bool) -> bytes | None:
    """The secret of this user, made if asked for; None where there is none that only this user can read."""
    try:
        path = expanded(KEY)
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path, mode=0o600) as file:
                file.write(secrets.token_bytes(32))
        with os.fdopen(open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status, key = os.fstat(file.fileno()), file.read(64)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return key if private and len(key) == 32 and other_owner(path) is None else None
    except (OSError, TLTError) as error:
        logger.info("No key to seal files with (%s): %s", KEY, error)
        return None


def _entries(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Every directory entry from the root to `path`, as it is written and as its links lead."""
    for way in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        yield from reversed([Path(way), *list(Path(way).parents)[:-1]])


def check_private(directory: Path) -> None:
    """Raise TLTError where `directory` is a link, another user's or open to others; OSError where it is not there."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise TLTError(f"{directory} must be a directory.")
    if status.st_uid != os.geteuid():
        raise TLTError(f"{directory} belongs to user {status.st_uid}, not to this one.")
    if status.st_mode & 0o077:
        raise TLTError(f"{directory} is open to other users; chmod 700 it.")


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor that appends to an ordinary file, made if missing; an OSError for a link too."""
    return open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of an ordinary file; an OSError where it is none, a pipe or a device, which is not waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is no ordinary file")
    return descriptor


@contextmanager
def replacing(path: Path, mode: int = 0o664) -> Iterator[BinaryIO]:
    """A new file that is given the name `path` when the block ends, and is removed when it raises; OSError.

    What had the name, be it a link, is replaced. By its `mode` not everybody may write to it, whatever the umask.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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


def make_private_dir(prefix: str) -> Path:
    """Make a temporary directory (0700) for this process, and remove those of this user's dead processes.

    A file lock, which ends with its process, says which are dead: a run that is killed cannot clean up.
    """
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
        status = os.lstat(owner.parent)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
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
