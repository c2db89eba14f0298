"""Imports run one way: the pure rooms know nothing of verl, vLLM or Ray, and numpy-only rooms nothing of torch."""

import ast
from pathlib import Path

import pytest

import verl_tlt

ROOT = Path(verl_tlt.__file__).parent
FRAMEWORKS = {"verl", "vllm", "ray"}
ADAPTERS = ("verl_tlt.rollout", "verl_tlt.engine", "verl_tlt.trainer", "verl_tlt.platform", "verl_tlt.spot.worker")
SPOT = ("phase.py", "session.py", "gap.py", "buffer.py", "merge.py", "gate.py")
STANDARD = ("__init__.py", "plugin.py", "hooks.py", "config.py", "control/types.py")


def files(*rooms):
    """Python files of these rooms (folders or files) that exist."""
    for room in rooms:
        path = ROOT / room
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def imported(path, lazily=True):
    """Absolute names of everything `path` imports; without `lazily` only what importing it runs."""
    tree = ast.parse(path.read_text())
    skipped = set()
    if not lazily:
        for node in ast.walk(tree):
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                skipped |= set(ast.walk(node))
    names = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def roots(path, lazily=True):
    return {name.partition(".")[0] for name in imported(path, lazily)}


@pytest.mark.parametrize("room", ["control", "drafter", "simulate", *(f"spot/{name}" for name in SPOT)])
def test_pure_rooms_know_no_framework_and_no_adapter(room):
    for path in files(room):
        assert not roots(path) & FRAMEWORKS, path
        reached = [name for name in imported(path) if name.startswith(ADAPTERS)]
        assert not reached, f"{path} imports {reached}"


@pytest.mark.parametrize("room", ["control", "simulate", "spot/phase.py", "spot/session.py", "spot/gap.py"])
def test_numeric_rooms_need_no_torch(room):
    for path in files(room):
        assert "torch" not in roots(path), path


@pytest.mark.parametrize("name", STANDARD)
def test_what_every_process_loads_is_standard_library(name):
    import sys

    assert roots(ROOT / name, lazily=False) <= set(sys.stdlib_module_names) | {"verl_tlt"}


def test_the_hydra_plugin_needs_hydra_alone():
    import sys

    path = ROOT.parent / "hydra_plugins" / "verl_tlt_search.py"
    assert roots(path) <= set(sys.stdlib_module_names) | {"hydra"}


def test_the_test_sees_an_offender(tmp_path):
    path = tmp_path / "offender.py"
    path.write_text("def f():\n    from vllm.v1 import engine\n")
    assert "vllm" in roots(path) and "vllm" not in roots(path, lazily=False)
