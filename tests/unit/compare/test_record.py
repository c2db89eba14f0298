"""Whose turn it is, and what a comparison that is called again finds."""

import errno
import fcntl
import json
import os

import pytest

from verl_tlt.commands.compare.record import CompareError, Record, Step, Turn, schedule

ASKED = {"--steps": 4, "recipe": ["a=1"], "arm tlt": ["+tlt=default"]}


def turn(arm, number, seconds=50.0):
    steps = [Step(number, n, 9.0, 5.0, 800.0, 300.0, reward=0.5) for n in (2, 3)]
    return Turn(arm, number, steps, seconds, 11.0, 3.0)


def test_every_arm_has_every_place_in_turn():
    rounds = [[name for name, turn in schedule("abc", 3) if turn == number] for number in range(3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_a_comparison_that_is_called_again_goes_on(tmp_path):
    first = Record(tmp_path, ASKED)
    first.add(turn("tlt", 0))
    first.add(turn("stock", 0))
    del first
    again = Record(tmp_path, ASKED)
    assert again.left(["stock", "tlt", "vllm-3"], 1) == [("vllm-3", 0)] and again.left(["tlt"], 2) == [("tlt", 1)]
    assert again.turns == [turn("tlt", 0), turn("stock", 0)] and again.steps("tlt") == turn("tlt", 0).steps
    assert again.turns[0].start_s == 50.0 - 11.0 - 3.0 - 18.0


def test_one_with_other_arguments_is_refused_by_name_and_arms_may_be_added(tmp_path):
    Record(tmp_path, ASKED).add(turn("tlt", 0))
    for changed in ({"--steps": 5}, {"recipe": ["a=2"]}, {"arm tlt": []}):
        with pytest.raises(CompareError, match=f"another {next(iter(changed))}: give another --out"):
            Record(tmp_path, ASKED | changed)
    Record(tmp_path, {"--steps": 4, "recipe": ["a=1"], "arm vllm-3": ["k=3"]}).add(turn("vllm-3", 0))
    assert not Record(tmp_path, ASKED).left(["vllm-3"], 1)
    with pytest.raises(CompareError, match="arm vllm-3"):
        Record(tmp_path, {"arm vllm-3": ["k=4"]})


def test_two_at_a_time_are_refused(tmp_path):
    first = Record(tmp_path, ASKED)
    with pytest.raises(CompareError, match="Another comparison is writing"):
        Record(tmp_path, ASKED)
    assert first.turns == []


@pytest.mark.parametrize("text", ["{}", '{"asked": {}, "turns": [{"arm": "tlt"}]}', "[]", "half a li"])
def test_what_is_no_record_is_one_sentence(tmp_path, text):
    (tmp_path / "turns.json").write_text(text)
    with pytest.raises(Exception, match=r"turns\.json") as error:
        Record(tmp_path, ASKED)
    assert "\n" not in str(error.value)


def test_time_left_is_that_of_the_turns_before(tmp_path):
    record = Record(tmp_path, ASKED)
    assert record.seconds_left(["stock", "tlt"], 2) is None
    record.add(turn("stock", 0, seconds=40.0))
    assert record.seconds_left(["stock", "tlt"], 2) == 3 * 40.0, "an arm that is not known yet takes what others did"
    record.add(turn("tlt", 0, seconds=60.0))
    assert record.seconds_left(["stock", "tlt"], 2) == 100.0
    assert json.loads((tmp_path / "turns.json").read_text())["asked"] == ASKED


def test_a_comparison_without_a_turn_begins_anew_and_nobody_elses_checkpoint_is_removed(tmp_path):
    (own := tmp_path / "own").mkdir()
    Record(own, ASKED)
    (own / "tlt" / "global_step_4").mkdir(parents=True)  # of a turn that was killed
    assert Record(own, {"--steps": 5}).turns == []
    (theirs := tmp_path / "runs" / "tlt" / "global_step_30").mkdir(parents=True)
    with pytest.raises(CompareError, match=rf"{theirs} is of no comparison"):
        Record(tmp_path / "runs", ASKED)


def test_a_file_system_without_locks_is_no_reason_to_refuse(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre, as many clusters mount it

    monkeypatch.setattr(fcntl, "flock", flock)
    Record(tmp_path, ASKED).add(turn("tlt", 0))
    assert Record(tmp_path, ASKED).turns == [turn("tlt", 0)]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "turns.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        Record(tmp_path / "out", ASKED)
    assert (tmp_path / "precious").read_text() == "precious"


def test_turns_that_others_may_have_written_are_not_gone_on_with(tmp_path):
    Record(tmp_path, ASKED).add(turn("tlt", 0))
    (tmp_path / "turns.json").chmod(0o666)
    with pytest.raises(CompareError, match="everybody may write to"):
        Record(tmp_path, ASKED)


@pytest.mark.parametrize(
    ("key", "value"),
    [("seconds", "long"), ("turn", "0"), ("turn", None), ("steps", {}), ("steps", [{"step_s": "fast"}]), ("arm", 3),
     ("first_s", [1]), ("checkpoint_s", {}), ("accept_length", "two"), ("steps", ["x"])],
)  # fmt: skip
def test_a_record_with_values_of_another_kind_is_a_sentence(tmp_path, key, value):
    Record(tmp_path, ASKED).add(turn("tlt", 0))
    file = tmp_path / "turns.json"
    kept = json.loads(file.read_text())
    kept["turns"][0][key] = value
    file.write_text(json.dumps(kept))
    with pytest.raises(CompareError, match=rf"{file} holds no turns of a comparison: turns\.0\.{key}"):
        Record(tmp_path, ASKED)
    file.write_text(json.dumps({"asked": 3, "turns": 4}))
    with pytest.raises(CompareError, match="holds no turns"):
        Record(tmp_path, ASKED)
