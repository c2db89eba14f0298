"""What the mutation score is made of: mutants of decisions alone, and the interval of a share."""

import pytest

from benchmarks import mutation
from benchmarks.mutation import interval, mutants

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


def test_an_interval_by_hand():
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
