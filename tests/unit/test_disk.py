"""Files and folders are replaced whole, on disks that are full or cannot do everything, and JSON is an object."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.files.disk import CONFIG, free_bytes, remove_model, replacing, replacing_folder
from verl_tlt.files.json_files import read_json


def write(target, text):
    with replacing_folder(target) as draft:
        (draft / "training").mkdir()
        for name in (CONFIG, "weights", "training/state"):
            (draft / name).write_text(text)


def held(target):
    return {str(f.relative_to(target)): f.read_text() for f in target.rglob("*") if f.is_file()}


NEW = dict.fromkeys((CONFIG, "weights", "training/state"), "new")


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    file = tmp_path / "file"
    for text in (b"old", b"new"):
        with replacing(file) as stream:
            stream.write(text)
    with pytest.raises(ValueError, match="stop"), replacing(file) as stream:
        stream.write(b"half")
        raise ValueError("stop")
    assert file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


KILLED = """
import os, pathlib, signal, sys
from verl_tlt.files.disk import replacing_folder
with replacing_folder(pathlib.Path(sys.argv[1])) as draft:
    (draft / "weights").write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_the_middle_leaves_the_old_one(tmp_path):
    write(tmp_path / "d", "old")
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path / "d"]).returncode == -9
    assert held(tmp_path / "d")["weights"] == "old"


def test_a_mount_that_cannot_flush_a_folder_has_the_files(tmp_path, monkeypatch):
    """CIFS, sshfs and other FUSE shares answer EINVAL or ENOTSUP."""
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    write(tmp_path / "d", "old")
    monkeypatch.setattr(os, "fsync", refuse)
    write(tmp_path / "d", "new")
    assert held(tmp_path / "d") == NEW and [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_mount_that_cannot_rename_folders_has_the_files_one_by_one(tmp_path, monkeypatch):
    """As object stores that are mounted; `config.json` is written last."""
    copied = []
    write(tmp_path / "d", "old")
    (tmp_path / "d" / "README.md").write_text("of the old one")

    def refuse(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    copyfile = shutil.copyfile
    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(shutil, "copyfile", lambda a, b: (copied.append(Path(b).name), copyfile(a, b)))
    write(tmp_path / "d", "new")
    assert held(tmp_path / "d") == NEW and [p.name for p in tmp_path.iterdir()] == ["d"]
    assert copied[-1] == CONFIG and len(copied) == 3


@pytest.mark.parametrize("where", ["write", "flush", "copy"])
def test_a_full_disk_is_one_sentence_with_the_place(tmp_path, monkeypatch, where):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path / "d", "old")
    if where == "copy":
        monkeypatch.setattr(Path, "rename", full)
        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        monkeypatch.setattr(*((Path, "write_text") if where == "write" else (os, "fsync")), full)
    with pytest.raises(TLTError, match=rf"^{tmp_path / 'd'} could not be written: No space left on device\.$"):
        write(tmp_path / "d", "new")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] in (["d"], []) and held(tmp_path / "d").get(CONFIG) in ("old", None)


def enosys(path):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)


@pytest.mark.parametrize(
    ("answer", "free"),
    [
        (lambda _: SimpleNamespace(total=0, used=0, free=0), None),  # BlobFuse, rclone
        (enosys, None),
        (lambda _: SimpleNamespace(total=10, used=10, free=0), 0),
    ],
)
def test_a_mount_that_does_not_tell_its_free_space_is_not_full(tmp_path, monkeypatch, answer, free):
    monkeypatch.setattr(shutil, "disk_usage", answer)
    assert free_bytes(tmp_path) == free


def test_a_model_that_is_removed_loses_its_config_first(tmp_path, monkeypatch):
    write(tmp_path / "d", "old")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it
        remove_model(tmp_path / "d")
    assert CONFIG not in held(tmp_path / "d")
    remove_model(tmp_path / "d")
    remove_model(tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"{", "is not readable JSON"), (b"[" * 10**5, "is not readable JSON"),
     (b"[1]", "must hold a JSON object, not a list")],
)  # fmt: skip
def test_what_is_no_object_is_one_sentence(tmp_path, content, said):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(DrafterError, match=f"^{tmp_path / 'file'} {said}"):
        read_json(tmp_path / "file")
    (tmp_path / "file").write_bytes(b'\xef\xbb\xbf{"a": 1}')  # with a byte order mark
    assert read_json(tmp_path / "file") == {"a": 1}
