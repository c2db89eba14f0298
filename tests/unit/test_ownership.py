"""Who can have written a file, asked of real files: another user's where this test runs as root, else by a stand-in."""

import logging
import os
import shutil

import pytest

from verl_tlt.drafter.checkpoint import STAGE_DIR, replaced, stage, staged_weights
from verl_tlt.errors import TLTError
from verl_tlt.files.ownership import (
    OWNER,
    SEAL,
    TRUSTED_MOUNT,
    check_private,
    make_private_dir,
    open_to_append,
    other_owner,
    replacing,
    sealed,
)
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, load_table, save_table, table_path
from verl_tlt.speculation.step_control import StepTrace
from verl_tlt.speculation.types import Step
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.checkpoints import CHECKPOINT, saved_drafter
from verl_tlt.trainer.runtime_switch import SWITCH_FILE, SwitchError, read_switch, write_switch

KEY = TableKey("H100", "policy", "0.30")
TABLE = LatencyTable((LatencyPoint(1, 500, 3, 0.02, 7),))


@pytest.fixture
def theirs(everybodys, give_away):
    """A directory that another user put below one that everybody may write to, with a file and a switch in it."""
    run = everybodys / "run"
    run.mkdir()
    (run / "file").touch()
    (run / SWITCH_FILE).write_text("speculation: off\n")
    give_away(run)
    return run


def test_ones_own_is_ones_own_and_every_path_has_an_answer(everybodys, tmp_path):
    (everybodys / "run").mkdir()
    (everybodys / "run" / "file").touch(mode=0o644)
    for path in ("run/file", "run/absent", "no/way", "run/file/below"):
        assert other_owner(everybodys / path) is None
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be looked up (Too many levels of symbolic links)" in other_owner(tmp_path / "loop")
    assert "cannot be looked up" in other_owner(tmp_path / "loop" / "below")


def test_a_file_is_replaced_and_never_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "name").symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "name") as file:
        file.write(b"new")
    with pytest.raises(KeyError), replacing(tmp_path / "name") as file:
        file.write(b"half")
        raise KeyError
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "name").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_another_users_counts_where_only_that_user_could_put_it(tmp_path, everybodys, give_away, theirs):
    said = f"{theirs} belongs to user 54321, and everybody may write to {everybodys}"
    assert other_owner(theirs / "file") == said
    assert other_owner(theirs / "file", also=54321) is None
    (tmp_path / "file").touch()
    give_away(tmp_path / "file")
    assert other_owner(tmp_path / "file") is None


def test_a_link_is_judged_by_where_it_lies_and_where_it_leads(tmp_path, everybodys, give_away, theirs):
    (tmp_path / "link").symlink_to(theirs / "file")
    assert "belongs to user" in other_owner(tmp_path / "link")
    (tmp_path / "ours").touch()
    (everybodys / "link").symlink_to(tmp_path / "ours")
    assert other_owner(everybodys / "link") is None
    give_away(everybodys / "link")
    assert f"{everybodys / 'link'} belongs to user 54321" in other_owner(everybodys / "link")


def test_what_everybody_may_write_to_and_what_is_no_file_counts_for_nothing(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    os.mkfifo(tmp_path / "pipe")
    assert other_owner(tmp_path / "file") == f"everybody may write to {tmp_path / 'file'}"
    assert other_owner(tmp_path / "pipe") == f"{tmp_path / 'pipe'} is no ordinary file"


def test_the_switch_of_another_user_is_not_obeyed(tmp_path, theirs):
    with pytest.raises(SwitchError, match=rf"{SWITCH_FILE} is not obeyed: .* belongs to user 54321"):
        read_switch(theirs)
    os.mkfifo(tmp_path / SWITCH_FILE)  # a pipe holds nobody up
    with pytest.raises(SwitchError, match="is no ordinary file"):
        read_switch(tmp_path)


def test_whatever_the_umask_ones_own_files_count(tmp_path):
    (tmp_path / "trainer.jsonl").touch()
    mask = os.umask(0)
    try:
        write_switch(tmp_path, spot=False)
        save_table(tmp_path, KEY, TABLE)
    finally:
        os.umask(mask)
    assert not read_switch(tmp_path).spot and load_table(tmp_path, KEY) == TABLE


def test_costs_of_another_user_are_not_read(everybodys, give_away, caplog):
    save_table(everybodys, KEY, TABLE)
    assert load_table(everybodys, KEY) == TABLE
    give_away(everybodys)
    everybodys.chmod(0o1777)
    with caplog.at_level(logging.WARNING):
        assert load_table(everybodys, KEY) is None
    assert "and learned anew" in caplog.text
    assert table_path(everybodys, KEY).exists(), "another user's file is left where it is"


def test_a_checkpoint_is_believed_if_it_is_its_owners(tmp_path, give_away):
    for step in (1, 2):
        place = tmp_path / f"global_step_{step}" / CHECKPOINT
        place.mkdir(parents=True)
        (place / "config.json").touch()
        place.parent.chmod(0o777)
    first, last = tmp_path / "global_step_1", tmp_path / "global_step_2"
    assert saved_drafter(last) == last / CHECKPOINT
    give_away(last)  # all of it: whoever wrote the policy's state, which verl unpickles
    last.chmod(0o777)
    assert saved_drafter(last) == last / CHECKPOINT
    give_away(first / CHECKPOINT)
    assert saved_drafter(first) is None


@pytest.fixture
def fixed_mount(tmp_path, monkeypatch):
    """A directory as on a mount of fixed permissions: every file is everybody's, and chmod is refused."""

    def refuse(path, mode, **_):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "mount" / "global_step_1").mkdir(parents=True)
    mask = os.umask(0)
    monkeypatch.setattr(os, "chmod", refuse)
    yield tmp_path / "mount"
    os.umask(mask)


def write_drafter(step):
    with replaced(step / CHECKPOINT) as draft:
        for name in ("config.json", "model.safetensors"):
            (draft / name).write_text(name)
    return step / CHECKPOINT


def test_on_a_mount_of_fixed_permissions_ones_own_checkpoint_is_resumed_and_a_forged_one_is_not(fixed_mount, tmp_path):
    step = fixed_mount / "global_step_1"
    place = write_drafter(step)
    assert other_owner(place / "config.json"), "the mount says that everybody may have written it"
    assert saved_drafter(step) == place and sealed(place)
    key = tmp_path / "home" / ".config" / "verl-tlt" / "seal.key"
    assert oct(key.stat().st_mode & 0o777) == "0o600" and key.read_bytes() not in (place / SEAL).read_bytes()
    for change in (
        lambda: (place / "config.json").write_text("forged"),
        lambda: (place / "more.safetensors").write_text("added"),
        lambda: (place / "model.safetensors").unlink(),
        lambda: (place / SEAL).write_text("f" * 64),
        lambda: os.truncate(place / SEAL, 1 << 40),  # more than the memory holds
        lambda: (place / SEAL).unlink(),
    ):
        change()
        assert not sealed(place) and saved_drafter(step) is None
        shutil.rmtree(place)
        assert write_drafter(step) == saved_drafter(step)
    key.write_bytes(b"k" * 32)  # whoever has another key has another's seal
    assert saved_drafter(step) is None
    key.unlink()
    key.touch(mode=0o644)
    key.write_bytes(b"k" * 32)
    assert not sealed(write_drafter(step)), "a key that others can read proves nothing"


def test_a_mount_that_the_user_trusts_is_believed_and_nothing_beside_it(fixed_mount, tmp_path, monkeypatch):
    step = fixed_mount / "global_step_1"
    place = write_drafter(step)
    (place / SEAL).unlink()
    assert saved_drafter(step) is None
    monkeypatch.setenv(TRUSTED_MOUNT, str(fixed_mount))
    assert saved_drafter(step) == place
    (tmp_path / "beside").touch(mode=0o666)
    (fixed_mount / "link").symlink_to(tmp_path / "beside")
    assert other_owner(tmp_path / "beside") and other_owner(fixed_mount / "link")


def test_where_permissions_tell_nothing_is_sealed(tmp_path):
    assert not (write_drafter(tmp_path) / SEAL).exists()


def test_a_drafter_is_staged_and_loaded_in_private(tmp_path, monkeypatch):
    directory = tmp_path / "drafter"
    monkeypatch.setenv(STAGE_DIR, str(directory))
    stage("{}", b"weights", directory)
    assert oct(directory.stat().st_mode & 0o777) == "0o700"
    assert {oct(file.stat().st_mode & 0o777) for file in directory.iterdir()} == {"0o600"}
    assert staged_weights().read_bytes() == b"weights"
    directory.chmod(0o770)
    for call in (staged_weights, lambda: stage("{}", b"other", directory)):
        with pytest.raises(TLTError, match="is open to other users; chmod 700 it"):
            call()


def test_what_is_staged_is_the_old_drafter_or_the_new_one(tmp_path, monkeypatch):
    weights, replace, seen = tmp_path / "drafter" / "model.safetensors", os.replace, []
    stage("{}", b"old", weights.parent)

    def look(source, target):
        seen.append(weights.read_bytes())
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    stage("{}", b"new" * 1000, weights.parent)
    assert seen == [b"old", b"old"] and weights.read_bytes() == b"new" * 1000
    assert len(list(weights.parent.iterdir())) == 2


def test_a_directory_that_another_user_made_is_not_private(tmp_path, give_away):
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    with pytest.raises(TLTError, match="must be a directory"):
        check_private(tmp_path / "link")
    give_away(tmp_path / "ours")
    for call in (check_private, lambda directory: stage("{}", b"", directory)):
        with pytest.raises(TLTError, match="belongs to user 54321"):
            call(tmp_path / "ours")


def test_sweeping_leaves_what_another_user_named_like_ours(everybodys, give_away, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(everybodys))
    for folder in (everybodys / "tlt-theirs", everybodys / "tlt-dead", tmp_path / "precious"):
        folder.mkdir()
        (folder / OWNER).touch()
    (everybodys / "tlt-link").symlink_to(tmp_path / "precious")
    give_away(everybodys / "tlt-theirs")
    ours = make_private_dir("tlt-")
    assert {p.name for p in everybodys.iterdir()} == {"tlt-theirs", "tlt-link", ours.name}
    assert (everybodys / "tlt-theirs" / OWNER).exists() and (tmp_path / "precious" / OWNER).exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_trace_is_not_written_through_a_link_and_waits_for_no_pipe(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    for name in ("trainer", "engine-0"):
        place = tmp_path / f"{name}.jsonl"
        place.symlink_to(precious) if kind == "link" else os.mkfifo(place)
    writer, steps = TraceWriter(tmp_path, "trainer"), StepTrace(tmp_path / "engine-0.jsonl")
    writer.emit("run", step0=1)
    steps.add(Step(1, 10, 0, 0, unix_s=1.0))
    assert writer.failures == 2 and precious.read_text() == "mine\n"
    assert "no ordinary file" in steps.failed if kind == "pipe" else steps.failed


def test_what_is_opened_to_append_is_new_or_ordinary(tmp_path):
    os.close(open_to_append(tmp_path / "new"))
    assert oct((tmp_path / "new").stat().st_mode & 0o777 & ~0o022) == "0o644"
    with pytest.raises(OSError):
        open_to_append(tmp_path)


@pytest.mark.parametrize("part", ["../../etc/passwd", "/etc/passwd", "..", "a\0b", "~/x", "$(x)"])
def test_a_table_stays_in_its_directory(tmp_path, part):
    path = table_path(tmp_path, TableKey(part, part, part))
    assert path.parent == tmp_path and "\0" not in path.name
    assert save_table(tmp_path, TableKey(part, part, part), TABLE) == path
