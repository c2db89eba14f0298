"""The faults of `make test-faults`: what they name exists, and their verdicts can fail."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.faults import actions, judge
from benchmarks.faults.injector import EVERY
from benchmarks.faults.plan import BOUNDS, FAULTS, STEPS, Fault
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.trace.events import Session

ROOT = Path(__file__).parents[2]


def named_by(target, look=getattr):
    pytest.importorskip("vllm")
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = look(found, name)
    return found


def test_what_the_plan_names_exists_and_an_action_takes_whatever_its_function_takes():
    assert all(named_by(bound, inspect.getattr_static) is not None for bound in BOUNDS)
    for action, target in sorted({(fault.action, target) for fault in EVERY for target in fault.targets}):
        takes, kinds = inspect.signature(named_by(target)).parameters.values(), inspect.Parameter
        plain = [p.name for p in takes if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        named = {p.name: None for p in takes if p.kind is kinds.KEYWORD_ONLY}
        inspect.signature(getattr(actions, action)).bind("original", *plain, **named)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.recovers in judge.RECOVERIES and fault.step < STEPS for fault in FAULTS)


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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"fired": {}}, "it never struck"),
        ({"fired": {"spot-trainer-raising-f": 3}}, "recovered"),  # late: its only good session was in that step
        ({"ended": False}, "survived"),
        ({"same_weights": False}, "policy_updates_equal"),
        ({"stock": {**STOCK, 3: {**STOCK[3], "actor/grad_norm": 0.30000001}}}, "policy_updates_equal"),
        ({"steps": STOCK}, "tlt/spot_failures did not count it"),
        ({"log": ""}, "no line of the log says 'out of luck'"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(changes, complaint):
    for evidence, wrong in ((seen(), False), (seen(**changes), True)):
        assert (complaint in judge.wrong(FAULT, judge.row(FAULT, evidence), evidence)) == wrong
