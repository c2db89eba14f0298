"""Whose drafter it is: another user's is refused by name, one's own counts whatever the umask was."""

import os

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import DrafterError, save_drafter
from verl_tlt.drafter.check import check_owner
from verl_tlt.ownership import other_owner
from verl_tlt.trainer.run_setup import first_drafter


def test_another_users_is_refused(everybodys, give_away, policy_dir, drafter):
    saved = save_drafter(drafter, everybodys / "drafter", {})
    settings = TLTConfig.from_dict({"drafter": {"path": str(saved)}})

    def start():
        return first_drafter(settings, str(policy_dir), "float32", 64, None)

    assert start().origin == str(saved)
    give_away(saved)
    for refused in (lambda: check_owner(saved), start):
        with pytest.raises(DrafterError, match=rf"^{saved} may be another user's drafter: {saved} belongs to user"):
            refused()


def test_ones_own_counts_whatever_the_umask(tmp_path, drafter):
    mask = os.umask(0)
    try:
        saved = save_drafter(drafter, tmp_path / "drafter", {}, training_state={"steps": 3})
    finally:
        os.umask(mask)
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) == 5 and not any(other_owner(file) for file in files)
    (saved / "model.safetensors").chmod(0o666)
    with pytest.raises(DrafterError, match=r"everybody may write to .*model\.safetensors"):
        check_owner(saved)
