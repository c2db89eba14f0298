"""What is changed upstream at run time is as listed, and the diffs apply to the pinned releases.

A diff that no longer applies means that upstream changed those lines: see whether the change is still needed.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from sources import SourceTree, Symbol, source_root

from verl_tlt.server.stop_strings import end_at_stop_strings
from verl_tlt.vllm_worker.hybrid_states import count_rows_without_drafts, remember_accepted

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").rglob("*.patch"))
FACTS = ("Replaces", "Symptom", "Cause", "Upstream", "Applies to", "Becomes unnecessary with", "Made by")
"""What each section of the pages says."""


@dataclass(frozen=True)
class Change:
    """A section of a page."""

    page: str
    title: str
    facts: dict[str, str]

    @property
    def anchor(self):
        """The address of the section, as comments in the code give it."""
        return f"{self.page}#" + re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def code(self):
        """(name of the function that makes the change, its file)."""
        name, path = re.fullmatch(r"\[(.+)\]\(\.\./(.+)\)\.", self.facts["Made by"]).groups()
        return name.rpartition(".")[2], ROOT / path

    @property
    def patch(self):
        return self.facts["Diff"].partition("]")[0].removeprefix("[") if "Diff" in self.facts else None


def listed():
    """Every change of the two pages."""
    changes = []
    for page in ("patches/README.md", "verl_cpu/README.md"):
        found = re.compile(r"^\* \*\*(.+?)\*\*: (.+)$", re.MULTILINE)
        for section in re.split(r"^### ", (ROOT / page).read_text(), flags=re.MULTILINE)[1:]:
            changes.append(Change(page, section.partition("\n")[0], dict(found.findall(section))))
    return changes


CHANGES = listed()
CPU_CHANGES = [change for change in CHANGES if change.code[1].is_relative_to(ROOT / "verl_cpu")]


def touched(patch):
    return re.findall(r"^diff --git a/(\S+) b/", patch.read_text(), flags=re.MULTILINE)


def apply(patch, directory):
    """Copy the files the patch touches out of the installed release and apply it; returns the patched files."""
    for name in touched(patch):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        source = source_root(name.partition("/")[0]) / name
        if source.exists():
            shutil.copy(source, directory / name)
    command = ["git", "apply", "--whitespace=error", str(patch)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}  # not some outer repository
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{patch.name} no longer applies: is the change still needed?\n{done.stderr}"
    return [directory / name for name in touched(patch)]


def patched(word, directory, name=".py"):
    """The Python file that a patch makes of the installed release."""
    return next(file for file in apply(next(p for p in PATCHES if word in p.name), directory) if file.match(f"*{name}"))


def load(file, name):
    """A patched file as a module of its own, inside the package it came from."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    module.__package__ = name.rpartition(".")[0]
    spec.loader.exec_module(module)
    return module


def test_every_diff_is_the_upstream_form_of_a_change():
    named = [c.patch for c in CHANGES if c.patch]
    assert sorted(named) == [str(p.relative_to(ROOT / "patches")) for p in PATCHES]


def test_code_and_page_name_each_other():
    """Directly below the comment that names a section is the function that the section names."""
    marked = {}
    for path in (*(ROOT / "verl_tlt").rglob("*.py"), *(ROOT / "verl_cpu").rglob("*.py")):
        mark = re.compile(r"# Changes [\w-]+: (\w+/README\.md#\S+)\n(?:\s*@.*\n)*\s*(?:async )?(?:def|class) (\w+)")
        text = path.read_text()
        found = mark.findall(text)
        assert text.count("/README.md#") == len(found), path
        marked |= {anchor: (name, path) for anchor, name in found}
    assert marked == {change.anchor: change.code for change in CHANGES}
    assert all(set(FACTS) <= change.facts.keys() <= {*FACTS, "Diff"} for change in CHANGES)


def test_every_change_of_the_cpu_platform_is_listed():
    armed = set()
    for path in (ROOT / "verl_cpu").glob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        armed |= {
            ast.unparse(n.args[0]).split(".")[-1] for n in calls if ast.unparse(n.func) == "register_post_import_hook"
        }
    assert armed == {change.code[0] for change in CPU_CHANGES}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.anchor)
def test_what_is_said_of_a_change_is_so(change):
    site = source_root("verl")
    for symbol in re.findall(r"`([^`]+)`", change.facts["Replaces"]):
        symbol = symbol if ":" in symbol else f"{symbol}:"
        assert symbol.startswith("torch.") or SourceTree(site).problem(Symbol(symbol)) is None
    file, line, code = re.match(r"`([^`]+):(\d+)` `([^`]+)`", change.facts["Cause"]).groups()
    assert code in (site / file).read_text().splitlines()[int(line) - 1], "another release: is it still needed?"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_applies_to_the_installed_release(patch, tmp_path):
    for path in apply(patch, tmp_path):
        if path.suffix == ".py":
            ast.parse(path.read_text())


# ---------------------------------------------------------------------- with a diff applied, the change steps aside


def ends_at_stop_strings(module):
    changed, after = end_at_stop_strings(module.OutputProcessor), module.OutputProcessor.process_outputs
    assert not end_at_stop_strings(module.OutputProcessor), "applied twice"
    assert module.OutputProcessor.process_outputs is after and hasattr(after, "__wrapped__") == changed
    return changed


def counts_rows(module):
    runner = types.SimpleNamespace(_build_attention_metadata="stock")
    changed = count_rows_without_drafts(runner, module.GDNAttentionMetadataBuilder.build)
    assert changed == (runner._build_attention_metadata != "stock")
    return changed


def remembers_accepted(module):
    from vllm.v1.worker.gpu_input_batch import InputBatch

    runner = types.SimpleNamespace(_update_states="stock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputBatch, "add_request", module.InputBatch.add_request)
        changed = remember_accepted(runner)
    assert changed == (runner._update_states != "stock")
    return changed


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("word", "name", "changed"),
    [
        ("stop-strings", "vllm.v1.engine.output_processor", ends_at_stop_strings),
        ("rows-without-drafts", "vllm.v1.attention.backends.gdn_attn", counts_rows),
        ("sat-out", "vllm.v1.worker.gpu_input_batch", remembers_accepted),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_what_has_the_diff_is_left_and_what_has_not_is_changed(tmp_path, word, name, changed, fixed):
    """Where stock is left too, upstream has caught up, and the change is not needed any more."""
    stock = Path(importlib.util.find_spec(name).origin)
    module = load(patched(word, tmp_path, stock.name) if fixed else stock, name)
    assert changed(module) != fixed
