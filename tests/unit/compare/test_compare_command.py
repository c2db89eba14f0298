"""What a comparison says before it starts anything, when it is interrupted, and of what it measured."""

import json

import pytest
from rich.console import Console

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.compare import command
from verl_tlt.commands.compare.command import announce, compare, report, time_needed
from verl_tlt.commands.compare.plan import TLT, Plan, named_arms
from verl_tlt.commands.compare.record import Record, Step, Turn
from verl_tlt.commands.console import make_console
from verl_tlt.commands.options import CompareOptions


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "out", {})


def test_it_says_beforehand_how_long_it_takes(record, tmp_path):
    def needed(**options):
        plan = Plan(Recipe(()), None, 6, tmp_path / "out")
        return time_needed(plan, named_arms([TLT], None), CompareOptions(rounds=2, **options), record)

    assert "4 jobs of 6 RL steps each are left, one after the other: 24 steps and 4 starts." in needed()
    step = {"timing_s/gen": 200.0, "timing_s/step": 300.0}
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps({"step": n, "data": step}) + "\n" for n in (1, 2)))
    assert "about 2 h 0 min, and 4 times the start and end of a job" in needed(metrics=log)
    record.turns.append(Turn("tlt", 0, [], 600.0, 9.0, 9.0))
    assert "3 jobs of 6 RL steps each are left, one after the other: about 30 min." in needed()


@pytest.mark.parametrize(
    ("settings", "drafter", "steps", "named"),
    [
        ((), None, 6, ["tlt, and 12 steps are too few", "tlt-no-spot, which does not train one"]),
        ((), None, 600, ["tlt-no-spot, which does not train one"]),
        (("tlt.spot.enable=false",), None, 600, ["tlt, which does not train one", "tlt-no-spot, which does not"]),
        ((), "/a/drafter", 6, []),
        (("tlt.drafter.method=mtp",), None, 6, []),
        (("tlt.speculation.source=ngram",), None, 6, []),
    ],
)
def test_it_warns_where_arms_have_no_drafter(tmp_path, record, capsys, settings, drafter, steps, named):
    plan = Plan(Recipe(settings), None, steps, tmp_path / "out")
    arms = named_arms([TLT, "tlt-no-spot"], drafter)
    announce(plan, arms, CompareOptions(rounds=2), record, drafter, make_console())
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("No drafter is given for") == len(named) and all(name in said for name in named), said


def test_interrupted_it_says_how_to_go_on(overrides, tmp_path, monkeypatch, capsys):
    def take_turn(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "take_turn", take_turn)
    overrides += ["trainer.resume_mode=disable", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True"]
    with pytest.raises(KeyboardInterrupt):
        compare(CompareOptions(overrides=overrides, out=tmp_path / "out"), make_console())
    assert "The same command runs the jobs that are left." in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "turns.json").is_file()


def test_it_prints_all_that_a_user_needs_of_what_it_measured(record, tmp_path, capsys):
    for turn in range(3):
        for name, seconds, difference in (("stock", 10.0, 2e-6), (TLT, 5.0, 3e-6)):
            steps = [
                Step(turn, 3 * turn + n, seconds, seconds - 2.0, 1000.0, 0.25, 3.5, probs_diff_max=difference)
                for n in (2, 3)
            ]
            record.add(Turn(name, turn, steps, 90.0 + 2 * seconds, 12.0, 4.0))
    plan, arms = Plan(Recipe(()), None, 3, tmp_path / "out"), named_arms([TLT], "/a/drafter")
    report(plan, arms, record, Console(width=120))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for arm in arms:
        assert f"{arm.name}: {arm.label}".split() in lines
    assert ["stock", "1", "1", "3.50", "0.250", "±", "0.000", "2.0e-06"] in lines
    rollout, step = (["2.67x", "(2.67", "to", "2.67)"], ["2.00x", "(2.00", "to", "2.00)"])
    assert [TLT, *rollout, *step, "3.50", "0.250", "±", "0.000", "3.0e-06"] in lines
    assert [TLT, "74", "12", "4"] in lines, "what the ratios leave out"
    assert any(line[:5] == ["tlt", "was", "faster", "than", "stock:"] for line in lines)
    assert [path.name for path in (tmp_path / "out").glob("compare.*")] == ["compare.json"]
