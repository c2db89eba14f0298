"""The map of the package, as a rule: which room may import which, and what of the world outside.

A folder of `verl_tlt` says which process runs its files. Rooms of different processes do not import each other; what
passes between them is in `messages`. The trainer is the exception that its job asks for: it starts
the others' actors, so it imports their classes. Commands (doctor, warmup, report, cli) stand above everything.
"""

import ast
import sys
from pathlib import Path

import pytest

import verl_tlt
from patches import cpu_changes, upstream_changes
from verl_tlt.compat.sources import SourceTree
from verl_tlt.compat.upstream_api import Symbol

ROOT = Path(verl_tlt.__file__).parent
FRAMEWORKS = {"verl", "vllm", "ray", "torch", "megatron", "transformers", "speculators"}

SHARED = {"config", "errors", "json_files", "messages", "ownership"}
MAY_IMPORT = {
    # PURE: decisions over numbers
    "errors": set(),
    "messages": set(),
    "ownership": {"errors"},
    "json_files": {"errors"},
    "bootstrap": set(),
    "speculation": {"errors", "json_files", "messages", "ownership"},
    "idle": {"speculation"},
    # what every process may carry
    "flag": set(),
    "config": {"errors", "speculation"},
    "compat": {"errors"},
    "child_engine": {"errors"},
    "drafter": {"errors", "json_files", "ownership"},
    "trace": {"messages", "ownership"},
    # one process each
    "engine_core": SHARED | {"compat", "speculation"},
    "vllm_worker": SHARED | {"compat", "drafter", "speculation"},
    "server": SHARED | {"compat", "drafter", "speculation"},
    "actor": SHARED | {"compat", "drafter"},
    "spot_worker": SHARED | {"compat", "drafter"},
    "trainer": SHARED
    | {"actor", "bootstrap", "compat", "drafter", "idle", "server", "speculation", "spot_worker", "trace"},
    # commands
    "console": set(),
    "report": {"console", "errors", "json_files", "ownership", "trace"},
    "doctor": SHARED | {"child_engine", "compat", "drafter", "flag", "idle", "server", "speculation", "trainer"},
    "warmup": SHARED | {"child_engine", "doctor", "drafter", "server"},
    "advise": {"config", "console", "doctor", "drafter", "errors", "json_files", "report", "server", "speculation"},
    "compare": {"bootstrap", "config", "console", "doctor", "errors", "flag", "json_files", "ownership", "report"},
    # what a run and a shell begin with
    "activation": SHARED | {"compat", "doctor", "trainer"},
    "plugin": {"activation", "compat", "flag", "trainer"},
    "cli": SHARED | {"advise", "compare", "compat", "console", "doctor", "drafter", "report", "trainer", "warmup"},
    "conf": set(),
}
FRAMEWORKS_OF = {
    **{
        room: set()
        for room in ("errors", "ownership", "json_files", "bootstrap", "speculation", "idle", "messages", "config")
    },
    "trace": set(),
    **{
        room: set()
        for room in (
            "child_engine",
            "compare",
            "console",
            "report",
            "plugin",
            "activation",
            "advise",
            "cli",
            "conf",
            "flag",
        )
    },
    "drafter": {"torch", "transformers", "speculators"},
    "compat": set(),
    "engine_core": {"vllm"},
    "vllm_worker": {"torch", "verl", "vllm"},
    "server": {"ray", "torch", "verl", "vllm"},
    "actor": {"megatron", "ray", "torch", "verl"},
    "spot_worker": {"ray", "torch"},
    "trainer": {"ray", "verl"},
    "warmup": {"torch", "transformers", "vllm"},
    "doctor": {"torch", "transformers", "verl", "vllm"},
}
STANDARD = ("__init__.py", "plugin.py", "compat/import_hooks.py", "flag.py", "speculation/types.py")
"""What every process loads, TLT or not."""


def imported(path, lazily=True):
    """Absolute names of everything `path` imports; without `lazily` only what importing it runs."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing_only or (not lazily and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
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


def room_of(name):
    """The room of a module's dotted name inside `verl_tlt`; None for the package itself and what is outside."""
    parts = name.split(".")
    return parts[1] if parts[0] == "verl_tlt" and len(parts) > 1 and parts[1] in MAY_IMPORT else None


def files(room):
    path = ROOT / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def test_every_file_is_in_a_room():
    here = {p.stem if p.parent == ROOT else p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py")}
    assert here - {"__init__"} == MAY_IMPORT.keys() == FRAMEWORKS_OF.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_it_may(room):
    for path in files(room):
        reached = {room_of(name) for name in imported(path)} - {None, room}
        assert reached <= MAY_IMPORT[room], f"{path} imports {reached - MAY_IMPORT[room]}"
        used = roots(path) & FRAMEWORKS
        assert used <= FRAMEWORKS_OF[room], f"{path} imports {used - FRAMEWORKS_OF[room]}"


def test_rooms_have_an_order():
    """Nobody is reached from what it may import: no circle among rooms, and none upward."""
    order = list(MAY_IMPORT)
    for room, below in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def test_no_two_files_import_each_other():
    """No circle among files either, however late the imports run."""
    modules = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): p
               for p in ROOT.rglob("*.py")}  # fmt: skip
    reaches = {name: imported(path) & modules.keys() - {name} for name, path in modules.items()}
    while True:
        leaves = {name for name, below in reaches.items() if not below & reaches.keys()}
        if not leaves:
            break
        reaches = {name: below for name, below in reaches.items() if name not in leaves}
    assert not reaches, f"files in or above a circle: {sorted(reaches)}"


@pytest.mark.parametrize("name", STANDARD)
def test_what_every_process_loads_is_standard_library(name):
    assert roots(ROOT / name, lazily=False) <= set(sys.stdlib_module_names) | {"verl_tlt"}


def test_the_cpu_platform_is_no_part_of_the_package():
    """`verl_cpu` uses verl-tlt's `compat`, never the other way round."""
    assert all("verl_cpu" not in roots(path) for path in ROOT.rglob("*.py"))
    used = {room_of(name) for path in (ROOT.parent / "verl_cpu").glob("*.py") for name in imported(path)}
    assert used == {"compat", None}


@pytest.mark.parametrize("change", (*upstream_changes.CHANGES, *cpu_changes.CHANGES), ids=lambda c: c.applied_by)
def test_an_upstream_change_names_the_code_that_makes_it(change):
    """tests/contract/test_patches.py has what it says of upstream."""
    module, _, function = change.applied_by.partition(":")
    assert SourceTree(ROOT.parent).problem(Symbol(f"{module}:{function}")) is None


def test_settings_need_no_framework():
    assert roots(ROOT / "config.py") <= set(sys.stdlib_module_names) | {"verl_tlt", "pydantic"}


def test_the_hydra_plugin_needs_hydra_alone():
    path = ROOT.parent / "hydra_plugins" / "verl_tlt_search.py"
    assert roots(path) <= set(sys.stdlib_module_names) | {"hydra"}
