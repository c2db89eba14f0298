"""Which drafter a resumed run finds."""

import logging

import pytest

from verl_tlt.trainer.bootstrap import CHECKPOINT, saved_drafter


@pytest.fixture
def checkpoints(tmp_path):
    """Steps 8 and 9 with a drafter, 10 and 11 without: the run was killed while they were written."""
    for step in (8, 9, 10, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    for step in (8, 9):
        (tmp_path / f"global_step_{step}" / CHECKPOINT).mkdir()
    (tmp_path / "global_step_latest" / CHECKPOINT).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("asked", "found"), [(8, 8), (9, 9), (10, 9), (11, 9)])
def test_a_resumed_run_takes_its_step_s_drafter_or_the_newest_before_it(checkpoints, asked, found, caplog):
    with caplog.at_level(logging.WARNING):
        directory = saved_drafter(checkpoints / f"global_step_{asked}")
    assert directory == checkpoints / f"global_step_{found}" / CHECKPOINT
    assert bool(caplog.records) == (asked != found)


def test_nothing_to_resume_from(checkpoints, tmp_path):
    assert saved_drafter(None) is None
    assert saved_drafter(checkpoints / "global_step_8" / "none" / "global_step_1") is None
    assert saved_drafter(checkpoints / "global_step_7") is None
