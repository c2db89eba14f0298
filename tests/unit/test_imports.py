"""The map of the package, as a rule: which room may import which, and what of the world outside.

A folder of `verl_tlt` says which process runs its files. Rooms of different processes do not import each other, but
for the trainer, which starts the others' actors. Imports go downwards only: from commands to the run, to the core.
"""

import ast
from pathlib import Path

import pytest

import verl_tlt

ROOT = Path(verl_tlt.__file__).parent
FRAMEWORKS = {"verl", "vllm", "ray", "torch", "megatron", "transformers", "speculators"}

SHARED = {"config", "errors", "files", "logs", "messages"}
MAY_IMPORT = {
    # the core: decisions over numbers, records, files; torch at most
    "errors": set(),
    "messages": set(),
    "logs": set(),
    "bootstrap": set(),
    "files": {"errors"},
    "speculation": {"errors", "files", "messages"},
    "idle": set(),
    "flag": set(),
    "capture": {"flag"},
    "config": {"errors", "speculation"},
    "upstream": {"errors"},
    "drafter": {"errors", "files"},
    "trace": {"files", "messages"},
    # the run: a folder a process, and what a run begins with
    "engine_core": SHARED | {"speculation", "upstream"},
    "vllm_worker": SHARED | {"drafter", "speculation", "upstream"},
    "server": SHARED | {"drafter", "speculation", "upstream"},
    "actor": SHARED | {"drafter", "upstream"},
    "spot_trainer": SHARED | {"bootstrap", "drafter", "upstream"},
    "trainer": SHARED
    | {"actor", "bootstrap", "drafter", "idle", "server", "speculation", "spot_trainer", "trace", "upstream"},
    "checks": SHARED | {"drafter", "flag", "idle", "server", "speculation", "upstream"},
    "activation": SHARED | {"checks", "trainer", "upstream"},
    "plugin": {"activation", "capture", "flag", "trainer"},
    # the commands
    "commands": SHARED
    | {"bootstrap", "capture", "checks", "drafter", "flag", "server", "speculation", "trace", "trainer", "upstream"},
}
FRAMEWORKS_OF = dict.fromkeys(MAY_IMPORT, frozenset()) | {
    "capture": {"ray"},
    "drafter": {"torch", "transformers", "speculators"},
    "engine_core": {"vllm"},
    "vllm_worker": {"torch", "verl", "vllm"},
    "server": {"ray", "torch", "verl", "vllm"},
    "actor": {"megatron", "ray", "torch", "verl"},
    "spot_trainer": {"ray", "torch"},
    "trainer": {"ray", "verl"},
    "checks": {"torch", "transformers"},
    "commands": {"torch", "transformers", "verl", "vllm"},
}
WITHOUT_FRAMEWORKS = ("advise", "cli", "compare", "console", "report")
"""Commands that work where no framework is installed."""


def imported(path):
    """Absolute names of everything `path` imports, also within functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for_types = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    names = set()
    for node in set(nodes).difference(*map(ast.walk, for_types)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def roots(path):
    return {name.partition(".")[0] for name in imported(path)}


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


@pytest.mark.parametrize("name", WITHOUT_FRAMEWORKS)
def test_a_command_needs_no_framework(name):
    for path in files(f"commands/{name}"):
        assert not roots(path) & FRAMEWORKS, f"{path} imports {roots(path) & FRAMEWORKS}"


def test_no_two_files_import_each_other():
    modules = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): p
               for p in ROOT.rglob("*.py")}  # fmt: skip
    reaches = {name: imported(path) & modules.keys() - {name} for name, path in modules.items()}
    while leaves := {name for name, below in reaches.items() if not below & reaches.keys()}:
        reaches = {name: below for name, below in reaches.items() if name not in leaves}
    assert not reaches, f"files in or above a circle: {sorted(reaches)}"


def test_the_cpu_platform_is_no_part_of_the_package():
    assert all("verl_cpu" not in roots(path) for path in ROOT.rglob("*.py"))
    assert all("verl_tlt" not in roots(path) for path in (ROOT.parent / "verl_cpu").glob("*.py"))
