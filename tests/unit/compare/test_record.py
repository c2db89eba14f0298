"""Whose turn it is, and what a comparison that is called again finds."""

import errno
import fcntl
import json
import os

import pytest

from verl_tlt.commands.compare.record import Record, Step, Turn, schedule
from verl_tlt.commands.processes import ProcessTree
from verl_tlt.errors import TLTError

ASKED = {"--steps": 4, "recipe": ["a=1"], "arm tlt": ["+trainer.plugin=tlt"]}


def turn(arm, number=0, seconds=50.0):
    steps = [Step(number, n, 9.0, 5.0, 800.0, reward=0.5) for n in (2, 3)]
    return Turn(arm, number, steps, seconds, 11.0, 3.0)


@pytest.fixture
def kept(tmp_path):
    """The folder of a comparison that has taken one turn."""
    Record(tmp_path / "out", ASKED).add(turn("tlt"))
    return tmp_path / "out"


def refused(folder, match, asked=ASKED):
    with pytest.raises(Exception, match=match) as error:
        Record(folder, asked)
    assert "\n" not in str(error.value)


def test_a_job_that_a_killed_comparison_leaves_running_keeps_the_next_one_waiting(tmp_path):
    record = Record(tmp_path, ASKED)
    tree = ProcessTree(["sleep", "60"], env=os.environ, log=tmp_path / "log", keeps=[record.lock.fileno()])
    record.lock.close()
    try:
        with pytest.raises(TLTError, match="a job that a killed one left running"):
            Record(tmp_path, ASKED)
    finally:
        tree.stop()
    Record(tmp_path, ASKED)


def test_every_arm_has_every_place_in_turn():
    rounds = [[name for name, turn in schedule("abc", 3) if turn == number] for number in range(3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_a_comparison_that_is_called_again_goes_on(kept):
    first = Record(kept, ASKED)
    first.add(turn("stock"))
    refused(kept, "Another comparison, or a job that a killed one left running, is writing")
    del first
    again = Record(kept, ASKED)
    assert again.left(["stock", "tlt", "vllm-3"], 1) == [("vllm-3", 0)] and again.left(["tlt"], 2) == [("tlt", 1)]
    assert again.turns == [turn("tlt"), turn("stock")] and again.steps("tlt") == turn("tlt").steps
    assert again.turns[0].start_s == 50.0 - 11.0 - 3.0 - 18.0
    assert json.loads((kept / "turns.json").read_text())["asked"] == ASKED


def test_figures_that_an_earlier_version_kept_are_no_reason_to_begin_anew(kept):
    text = (kept / "turns.json").read_text()
    (kept / "turns.json").write_text(text.replace('"saved_s":', '"overhead_s": 0.5, "saved_s":'))
    assert "overhead_s" not in text and Record(kept, ASKED).turns == [turn("tlt")]


def test_one_with_other_arguments_is_refused_by_name_and_arms_may_be_added(kept):
    for changed, said in (
        ({"--steps": 5}, r"another --steps \(4 then, 5 now\)"),
        ({"recipe": ["b=1", "a=2"]}, r"another recipe \(a=1 then, b=1 a=2 now\)"),
        ({"recipe": ["a=1", "a=1"]}, r"another recipe \(in another order\)"),
        ({"arm tlt": []}, r"another arm tlt \(\+trainer\.plugin=tlt then, nothing now\)"),
    ):
        refused(kept, f"{said}: go back to that, or give another --out", ASKED | changed)
    Record(kept, {"--steps": 4, "recipe": ["a=1"], "arm vllm-3": ["k=3"]}).add(turn("vllm-3"))
    assert not Record(kept, ASKED).left(["vllm-3"], 1)
    refused(kept, "arm vllm-3", {"arm vllm-3": ["k=4"]})


def test_turns_of_another_release_or_gpu_are_not_divided_by_these(tmp_path):
    here = {"verl": "0.9.1", "vllm": "0.28.0", "verl-tlt": "0.2.0", "GPU": "NVIDIA H200"}
    Record(tmp_path / "older", ASKED).add(turn("tlt"))
    Record(tmp_path / "older", ASKED | here).add(turn("stock"))  # which did not know where it was measured
    Record(tmp_path / "out", ASKED | here).add(turn("tlt"))
    Record(tmp_path / "out", ASKED | here)
    other = here | {"vllm": "0.29.0", "GPU": "NVIDIA B200"}
    said = r"another vllm \(0\.28\.0 then, 0\.29\.0 now\) and another GPU \(NVIDIA H200 then, NVIDIA B200 now\): "
    for folder in ("older", "out"):
        refused(tmp_path / folder, said, ASKED | other)


def test_a_comparison_without_a_turn_begins_anew_and_nobody_elses_checkpoint_is_removed(tmp_path):
    (own := tmp_path / "own").mkdir()
    Record(own, ASKED)
    (own / "tlt" / "global_step_4").mkdir(parents=True)  # of a turn that was killed
    assert Record(own, {"--steps": 5}).turns == []
    (theirs := tmp_path / "runs" / "tlt" / "global_step_30").mkdir(parents=True)
    refused(tmp_path / "runs", rf"{theirs} is of no comparison")


def test_a_file_system_without_locks_is_no_reason_to_refuse(kept, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre, as many clusters mount it

    monkeypatch.setattr(fcntl, "flock", flock)
    assert Record(kept, ASKED).turns == [turn("tlt")]


@pytest.mark.parametrize(
    "text", ["{}", '{"asked": {}, "turns": [{"arm": "tlt"}]}', '{"asked": 3, "turns": 4}', "[]", "half a li"]
)
def test_what_is_no_record_is_one_sentence(kept, text):
    (kept / "turns.json").write_text(text)
    refused(kept, r"turns\.json holds no jobs of a comparison")
