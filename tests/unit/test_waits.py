"""Nothing that reinforcement learning waits for lacks a bound: every blocking call of our processes, found in source.

What the awaiting of one server's own engine costs is stock verl's; the trainer bounds each call that leads there.
"""

import ast
from pathlib import Path

import pytest

import verl_tlt

ROOT = Path(verl_tlt.__file__).parent
ROOMS = ("actor", "server", "spot_trainer", "trainer")
WAITS = ("acquire", "get", "join", "recv", "result", "wait")
"""Of futures, threads, locks, events, Ray and processes; `get` is Ray's, since dictionaries have one too."""
HIT_IN = {
    "actor/tap.py:PUT_S": "unit/actor/test_verifier_capture.py",
    "server/engine_calls.py:ANSWER_S": "unit/server/test_server_bounds.py",
    "server/engine_calls.py:LOOK_S": "unit/server/test_server_bounds.py",
    "server/engine_calls.py:SCHEDULER_S": "unit/server/test_server_bounds.py",
    "server/server.py:ADMISSION_TIMEOUT_S": "unit/server/test_server_bounds.py",
    "server/server.py:STORE_S": "unit/server/test_server_bounds.py",
    "trainer/controller.py:WARM_UP_S": "unit/trainer/test_controller.py",
    "trainer/servers.py:CALIBRATION_S": "engine/test_fleet_bounds.py",
    "trainer/servers.py:SLEEP_S": "engine/test_fleet_bounds.py",
    "trainer/spot.py:MEMORY_S": "engine/test_spot_trainer.py",
    "trainer/spot.py:SAVE_S": "engine/test_spot_trainer.py",
    "trainer/spot.py:START_S": "engine/test_spot_trainer.py",
    "trainer/waits.py:CALL_S": "engine/test_fleet_bounds.py",
    "trainer/watch.py:LOOK_S": "unit/trainer/test_controller.py",
}
"""The test in which each bound is reached, and named. `tlt.spot.stop_timeout_s` is a setting, reached there, too."""


def unbounded(source):
    """Blocking calls of a module that pass neither a timeout nor `blocking=False`, as they are written."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr == "get" and owner != "ray":
            continue
        given = len(node.args) - (owner == "ray")  # what Ray waits for comes first
        bounds = {keyword.arg for keyword in node.keywords} & {"timeout", "timeout_s", "blocking"}
        if given < 1 and not bounds:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "path", [p for room in ROOMS for p in sorted((ROOT / room).glob("*.py"))], ids=lambda p: p.name
)
def test_every_wait_has_a_bound(path):
    assert set(unbounded(path.read_text())) == set()


def bounds():
    """Every bound that a module of ours gives to a wait: its constants that are seconds."""
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_S"):
                    yield f"{path.relative_to(ROOT)}:{ast.unparse(node.targets[0])}"


def test_every_bound_is_reached_in_a_test():
    pauses = {
        "server/client.py:RETRY_PAUSE_S",
        "trainer/run_setup.py:COLD_START_S",
        "trainer/watch.py:POLL_S",
        "trainer/watch.py:SETTLE_S",
    }  # nobody's answer is awaited
    assert set(bounds()) - pauses == HIT_IN.keys()
    for bound, test in HIT_IN.items():
        assert bound.partition(":")[2] in (ROOT.parent / "tests" / test).read_text(), bound
