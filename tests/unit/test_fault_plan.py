"""The faults of `make test-faults`: what they name exists, the page and the results say the same, verdicts can fail."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import actions, judge
from benchmarks.faults.injector import EVERY
from benchmarks.faults.plan import BOUNDS, ENGINE_KILLED, FAULTS, SAVE_EVERY, SERVER_KILLED, STEPS, Fault, waits_for
from benchmarks.faults.run import arm
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.trace.events import Session

ROOT = Path(__file__).parents[2]
KEYS = ["fault", "survived", "policy_updates_equal", "recovered", "counter"]


def table():
    """The page's table: {fault: counter}."""
    section = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## What a fault costs")[2]
    rows = re.findall(r"^\| (.+?) \| .+? \| ?(.*?) ?\|$", section.partition("\n## ")[0], re.MULTILINE)
    return {name: counter.strip("`") for name, counter in rows[1:]}


def named_by(target, look=getattr):
    pytest.importorskip("vllm")
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = look(found, name)
    return found


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_a_bound_of_the_plan_names_exists(bound):
    assert named_by(bound, inspect.getattr_static) is not None


@pytest.mark.parametrize(("action", "target"), sorted({(f.action, t) for f in EVERY for t in f.targets}))
def test_an_action_takes_whatever_its_function_takes(action, target):
    takes, kinds = inspect.signature(named_by(target)).parameters.values(), inspect.Parameter
    plain = [p.name for p in takes if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in takes if p.kind is kinds.KEYWORD_ONLY}
    inspect.signature(getattr(actions, action)).bind("original", *plain, **named)


def test_every_fault_can_be_judged_and_the_page_has_it_with_its_counter():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.recovers in judge.RECOVERIES and fault.step < STEPS for fault in FAULTS)
    page = table()
    assert page.keys() == {fault.name for fault in (*FAULTS, SERVER_KILLED, ENGINE_KILLED)}
    assert all(page[fault.name] == fault.counter for fault in FAULTS)


def test_where_steps_are_slow_every_fault_still_strikes_early_enough_to_be_judged():
    """Each second one is called a step late, and a checkpoint's with the checkpoint: with slow sessions it was so."""
    planned, struck = {fault.name: fault.step for fault in FAULTS}, {}
    for number, fault in enumerate(FAULTS):
        late = [struck[note] + gap for note, gap in waits_for(fault, planned, FAULTS).items()]
        step = max([fault.step, *late]) + (number % 2 if fault.step else 0)
        if fault.recovers == "saves":
            step = -(-step // SAVE_EVERY) * SAVE_EVERY
        struck |= {fault.note(target): step for target in fault.targets}
        assert step + fault.takes <= STEPS, fault.name
    assert step <= FAULTS[-1].step + len(FAULTS) // 2, "a checkpoint's fault holds up no other"


FAULT = Fault("spot trainer raising", 2, ("m:f",), "fail", "tlt/spot_failures", "out of luck", "trains")
STOCK = {step: {"actor/grad_norm": 0.1 * step, "actor/pg_loss": 0.0, "critic/score/mean": 0.5} for step in (1, 2, 3)}


def session(step, **facts):
    return Session(**{"t": 0.0, "step": step, "replica": "a", "start": 0.0, "end": 1.0, "steps": 9,
                      "tokens": 9, "outcome": "stopped", **facts})  # fmt: skip


def seen(**changes):
    """A run that went as it should."""
    steps = {step: {**metrics, "tlt/spot_failures": float(step == 2)} for step, metrics in STOCK.items()}
    trace = RunTrace(ROOT, sessions=[session(2, steps=0, error="out of luck"), session(3)])
    good = judge.Evidence(True, steps, STOCK, trace, "out of luck", {"spot-trainer-raising-f": 2}, same_weights=True)
    return dataclasses.replace(good, **changes)


def said_of(evidence, fault=FAULT):
    """What of its row is wrong."""
    return judge.wrong(fault, judge.row(fault, evidence), evidence)


def test_a_run_that_went_as_it_should_is_told_so():
    row = judge.row(FAULT, seen())
    assert list(row) == KEYS and list(row.values())[1:] == [True, True, True, "tlt/spot_failures"]
    assert said_of(seen()) == []


def test_what_counts_another_fault_does_not_count_this_one():
    other = next(fault for fault in judge.FAULTS if fault.counter == FAULT.counter)
    counted = {**STOCK, 3: {**STOCK[3], FAULT.counter: 1.0}}
    fired = {"spot-trainer-raising-f": 2}
    assert judge.row(FAULT, seen(steps=counted, fired=fired))["counter"], "late, and nobody else's"
    fired |= {other.note(target): 3 for target in other.targets}
    assert not judge.row(FAULT, seen(steps=counted, fired=fired))["counter"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"fired": {}}, "it never struck"),
        ({"fired": {"spot-trainer-raising-f": 3}}, "recovered"),  # late: its only good session was in that step
        ({"ended": False}, "survived"),
        ({"same_weights": False}, "policy_updates_equal"),
        ({"stock": {**STOCK, 3: {**STOCK[3], "actor/grad_norm": 0.30000001}}}, "policy_updates_equal"),
        ({"steps": {1: STOCK[1], 2: STOCK[2]}}, "policy_updates_equal"),
        ({"steps": STOCK}, "tlt/spot_failures did not count it"),
        ({"trace": RunTrace(ROOT, sessions=[session(2), session(3, steps=0)])}, "recovered"),
        ({"log": ""}, "no line of the log says 'out of luck'"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(changes, complaint):
    assert complaint in said_of(seen(**changes))


def carried_out(folder, code, faults=(), **more):
    """What a process prints that these faults are to strike."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | arm(folder, faults) | more
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


INJECTED = """
import os
from verl_tlt.trainer.step_log import Guard
print("armed")
from benchmarks.faults import injector
from benchmarks.faults.plan import Fault
folder = injector.Path(os.environ["TLT_FAULTS"])
import verl_tlt.trainer.step_log as module
fault = Fault("a fault", 3, ("verl_tlt.trainer.step_log:Guard.count",), "fail", "", "", "trains", first=2)
injector._wrap(folder, fault, fault.targets[0], {'another': 1}, module)
for step in (2, 3, 4):
    (folder / "step").write_text(str(step))
    for call in range(3):
        try:
            Guard().count("what", 1)
        except RuntimeError as error:
            print(step, call, error)
"""


@pytest.mark.parametrize(
    ("steps", "other", "struck"),
    [("(2, 3, 4)", 2, 3), ("(2, 5, 6)", 2, 5), ("(2, 3, 4)", 3, 4)],
    ids=["in time", "later", "after another"],
)
def test_a_fault_strikes_one_call_of_its_step_or_of_the_next_that_has_any(tmp_path, steps, other, struck):
    (tmp_path / "fired-another").write_text(f"{other} 1\n")
    said = carried_out(tmp_path, INJECTED.replace("(2, 3, 4)", steps))
    assert said.splitlines() == ["armed", f"{struck} 1 a fault was injected"]
    assert (tmp_path / "fired-a-fault-count").read_text().split()[0] == str(struck)


SESSIONS = """
import os
from benchmarks.faults import injector
from benchmarks.faults.plan import Fault
fault = Fault("a fault", 3, ("m:f",), "fail", "", "", "trains", sessions=3)
note = injector.Path(os.environ["TLT_FAULTS"]) / "fired-it"
print(int(injector._claim(note, int(os.environ["STEP"]), fault)))
"""


def test_a_fault_of_several_sessions_strikes_one_replicas_workers_one_after_the_other(tmp_path):
    said = []
    for step in (3, 4, 5, 5, 7, 9):  # a process each: in even steps it is the other replica's turn
        said.append(carried_out(tmp_path, SESSIONS, STEP=str(step)).split()[-1])
    assert said == ["1", "0", "1", "1", "0", "0"]


def test_every_fault_of_a_plan_is_armed_as_python_starts(tmp_path):
    faults = (*FAULTS, SERVER_KILLED, ENGINE_KILLED)
    modules = "from verl_tlt.upstream.import_hooks import _FINDER; print(*_FINDER.callbacks)"
    said = carried_out(tmp_path, modules, faults)
    assert set(said.split()) >= {t.partition(":")[0] for fault in faults for t in fault.targets}
