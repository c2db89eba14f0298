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
