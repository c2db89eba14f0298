"""What a comparison says before it starts anything, and when it is interrupted."""

import json

import pytest

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.compare import command
from verl_tlt.commands.compare.command import announce, compare, time_needed
from verl_tlt.commands.compare.plan import TLT, Plan, named_arms
from verl_tlt.commands.compare.record import Record, Turn
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
    assert "The same command takes the turns that are left." in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "turns.json").is_file()
