"""What a comparison says before it starts anything."""

import json

import pytest
from rich.console import Console

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.compare.command import announce
from verl_tlt.commands.compare.plan import TLT, Plan, named_arms
from verl_tlt.commands.compare.record import Record, Turn
from verl_tlt.commands.options import CompareOptions

ARMS = named_arms([TLT], None)


@pytest.fixture
def said(tmp_path):
    """Announces a comparison of 2 rounds of 6 steps in an empty folder."""
    record = Record(tmp_path / "out", {})

    def announced(drafter=None, turns=(), **options):
        record.turns[:] = turns
        console = Console(width=500, record=True, file=(tmp_path / "said").open("w"))
        plan = Plan(Recipe(()), None, 6, tmp_path / "out")
        announce(plan, ARMS, CompareOptions(rounds=2, **options), record, drafter, console)
        return console.export_text()

    return announced


def test_it_says_beforehand_how_long_it_takes(said, tmp_path):
    assert "4 jobs of 6 RL steps each are left, one after the other: 24 steps and 4 starts." in said()
    step = {"timing_s/gen": 200.0, "timing_s/step": 300.0}
    (log := tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "data": step}) + "\n" for n in (1, 2))
    )
    assert "about 2 h 0 min, and 4 times the start and end of a job" in said(metrics=log)
    assert "3 jobs of 6 RL steps each are left, one after the other: about 30 min." in said(
        turns=[Turn("tlt", 0, [], 600.0, 9.0, 9.0)]
    )


def test_it_warns_where_no_drafter_is_given_and_none_can_be_trained(said):
    assert "No drafter is given for tlt, and 12 steps are too few to train one" in said()
    assert "too few to train" not in said(drafter="/a/drafter")
