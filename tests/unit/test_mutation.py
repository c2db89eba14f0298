"""What the mutation score is made of: mutants of decisions alone, one change each, judged by the mirrored tests."""

import ast
import difflib
import json
import subprocess
import sys

import pytest

from benchmarks.mutation import PACKAGES, ROOT, interval, mirrored, mutants, source_of

FILE = ROOT / "verl_tlt" / "idle" / "failure_budget.py"
EVERY = [mutant for folder in PACKAGES.values() for path in (ROOT / folder).rglob("*.py") for mutant in mutants(path)]


def test_every_kind_of_place_is_changed():
    whats = [mutant.what for mutant in EVERY]
    assert "count >= MAX_FAILURES -> count > MAX_FAILURES" in whats
    assert "step + 2 ** (count - 1) -> step - 2 ** (count - 1)" in whats
    assert len(whats) > 1000
    assert any(what.endswith("-> return None") for what in whats)
    assert any(" and " in what.partition(" -> ")[0] and " or " in what.partition(" -> ")[2] for what in whats)
    assert any(what.startswith("max(") and "-> min(" in what for what in whats)


@pytest.mark.parametrize("mutant", list(mutants(FILE)), ids=lambda m: m.what)
def test_a_mutant_is_the_file_with_one_line_changed(mutant):
    before = ast.unparse(ast.parse(FILE.read_text())).splitlines()
    after = source_of(mutant).splitlines()
    changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[0] in "+-"][2:]
    assert len(changed) == 2 and changed[0][0] == "-" and changed[1][0] == "+"


def test_what_is_only_said_is_left_alone():
    for mutant in mutants(ROOT / "verl_tlt" / "idle" / "replica_idle.py"):
        assert not mutant.what.startswith(("raise", "f'"))


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
