"""What the mutation score is made of: mutants of decisions alone, one change each, judged by the mirrored tests."""

import ast
import difflib
import json
import subprocess
import sys

import pytest

from benchmarks import mutation
from benchmarks.mutation import ROOT, interval, mirrored, mutants, source_of

RULE = """
def spare(seconds, margin):
    if seconds < 0 or not margin:
        raise ValueError(f"{seconds + 1} s are none")
    return max(seconds - margin, 0.0)
"""


@pytest.fixture
def rule(tmp_path, monkeypatch):
    """The mutants of a small module."""
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "rule.py").write_text(RULE)
    return list(mutants(tmp_path / "rule.py"))


def test_every_decision_is_changed_and_what_is_only_said_is_not(rule):
    whats = [mutant.what for mutant in rule]
    for change in ("seconds < 0 -> seconds <= 0", "not margin -> margin", "seconds - margin -> seconds + margin",
                   "max(seconds - margin, 0.0) -> min(seconds - margin, 0.0)",
                   "seconds < 0 or not margin -> seconds < 0 and (not margin)"):  # fmt: skip
        assert change in whats
    assert any(what.endswith("-> return None") for what in whats) and not any("+ 1" in what for what in whats)


def test_a_mutant_is_the_file_with_one_line_changed(rule):
    before = ast.unparse(ast.parse(RULE)).splitlines()
    for mutant in rule:
        after = source_of(mutant).splitlines()
        changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[0] in "+-"][2:]
        assert [line[0] for line in changed] == ["-", "+"], mutant.what


def test_the_mirrored_tests_come_first():
    found = mirrored("verl_tlt/speculation/costs/latency.py")
    assert found[0].endswith("tests/unit/speculation/costs/test_latency.py") and len(found) > 10


def test_an_interval_by_hand():
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_a_mutant_that_no_test_sees_is_named():
    words = [sys.executable, "-m", "benchmarks.mutation", "--module", "idle/failure_budget.py", "--sample", "3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout[done.stdout.index("\n{") :])["packages"]["idle"]
    assert found["sample"] == 3 and found["killed"] + len(found["survived"]) == 3, done.stdout
    assert found["killed"] >= 2
