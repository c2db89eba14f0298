"""The chain of killed jobs: what a resumption is compared with."""

import pytest

from benchmarks.resume import Saved, held_by, history, judge
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.trace.events import Reload, TraceWriter

HELD = 40
WANT = Saved(3, 2, 3, HELD)
PAST = {"version": 2, "steps": 40}


def test_what_the_spot_trainer_logs_is_read_back():
    line = f"INFO:x:the spot trainer goes on from /out/global_step_3/tlt_drafter after {HELD} optimizer steps\n"
    assert held_by(f"noise\n{line}") == [HELD]
    assert held_by("the spot trainer starts anew: /x holds no training state") == []


def reload(step, version):
    return Reload(t=1.0, step=step, replica="a", version=version, ok=True)


def test_a_resumption_with_everything_of_one_step_is_equal():
    found = judge(WANT, PAST, 4, [HELD], [reload(4, 2), reload(5, 3)])
    assert set(found.values()) == {True}
    assert judge(WANT, PAST, 4, [HELD], [])["engines"] is None, "it was killed before they said so"


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        ("step", {"step0": 5}),
        ("version", {"past": {**PAST, "version": 1}}),
        ("engines", {"reloads": [reload(4, 1)]}),
        ("optimizer", {"held": [HELD + 1]}),
        ("optimizer", {"held": []}),
        ("optimizer_steps", {"past": {**PAST, "steps": 41}}),
    ],
)
def test_anything_of_another_step_shows(wrong, change):
    case = {"past": PAST, "step0": 4, "held": [HELD], "reloads": [reload(4, 2)], **change}
    found = judge(WANT, case["past"], case["step0"], case["held"], case["reloads"])
    assert {name for name, value in found.items() if value is False} == {wrong}


def test_what_a_killed_job_published_after_the_save_is_not_what_was_saved(tmp_path):
    """Killed after it had published version 2 in step 2, the job is resumed from step 2 with version 1."""
    clock = iter(range(1000))
    trace = TraceWriter(tmp_path, "trainer", clock=lambda: float(next(clock)))

    def step(number, version, trained):
        trace.emit(
            "session", step=number, replica="a", worker="a", start=float(next(clock)), end=0.0, steps=trained,
            tokens=9, outcome="stopped",
        )  # fmt: skip
        trace.emit("publish", step=number, version=version, decision="published")
        trace.emit("reload", step=number, replica="a", version=version, ok=True)

    trace.emit("run", step0=1, replicas=["a", "b"])
    step(1, 1, trained=5)
    step(2, 2, trained=7)
    assert history(read_trace(tmp_path), 2) == {"version": 1, "steps": 12}
    trace.emit("run", step0=3, replicas=["a", "b"])
    step(3, 2, trained=4)
    step(4, 3, trained=1)
    assert history(read_trace(tmp_path), 4) == {"version": 2, "steps": 17}
