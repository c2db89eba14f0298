"""The switch in a file, who is audited when, and the saving worked out by hand."""

import pytest
from typer.testing import CliRunner

from verl_tlt.messages.rollout import Calibration, EngineStats, LoadInterval, Work
from verl_tlt.speculation.types import OFF
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.audit import Audit, audit_of, audit_saving
from verl_tlt.trainer.runtime_control import RuntimeControl
from verl_tlt.trainer.runtime_switch import (
    SWITCH_FILE,
    TRACE_FILE,
    RuntimeSwitch,
    SwitchError,
    read_switch,
    write_switch,
)


@pytest.fixture
def run_dir(tmp_path):
    """A run's trace directory."""
    path = tmp_path / "checkpoints" / "tlt_trace"
    path.mkdir(parents=True)
    (path / TRACE_FILE).touch()
    return path


def test_without_a_file_everything_is_on(tmp_path):
    assert read_switch(tmp_path) == RuntimeSwitch(speculation=True, spot=True)


def test_switches_are_written_one_by_one_and_read_back(run_dir):
    write_switch(run_dir, speculation=False)
    assert write_switch(run_dir, spot=False, speculation=None) == RuntimeSwitch(False, False) == read_switch(run_dir)
    assert write_switch(run_dir, speculation=True) == RuntimeSwitch(True, False) == read_switch(run_dir)
    assert sorted(p.name for p in run_dir.iterdir()) == [SWITCH_FILE, TRACE_FILE]
    modes = {(run_dir / name).stat().st_mode for name in (SWITCH_FILE, TRACE_FILE)}
    assert len(modes) == 1, "the switch is as readable as anything else in the trace"


def test_the_trainer_s_trace_is_what_a_run_is_known_by(tmp_path):
    assert TraceWriter(str(tmp_path), "trainer").path.name == TRACE_FILE


def test_a_folder_that_is_no_run_is_refused(run_dir, tmp_path):
    for folder, sentence in (
        (tmp_path, f"{tmp_path} holds no trainer.jsonl, so it is not the trace directory of a run (tlt.trace.dir)."),
        (tmp_path / "absent", f"{tmp_path / 'absent'} does not exist, so it is not the trace directory of a run (tlt."),
        (run_dir.parent, f"; did you mean {run_dir}?"),
    ):
        with pytest.raises(SwitchError) as error:
            write_switch(folder, spot=False)
        assert sentence in str(error.value)
    assert not list(tmp_path.glob(f"**/{SWITCH_FILE}"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sped: off", "sped is not a switch"),
        ("spot: maybe", "spot must be on or off, not 'maybe'"),
        ("- spot", "must hold lines such as"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_understood_names_itself(tmp_path, text, said):
    (tmp_path / SWITCH_FILE).write_text(text)
    with pytest.raises(SwitchError, match=said) as error:
        read_switch(tmp_path)
    assert SWITCH_FILE in str(error.value)


def test_the_command_switches_and_says_what_is_on(run_dir, tmp_path):
    from verl_tlt.cli import app

    runner = CliRunner()
    assert "speculation on, spot training on" in runner.invoke(app, ["switch", str(run_dir)]).output
    assert not (run_dir / SWITCH_FILE).exists()
    done = runner.invoke(app, ["switch", str(run_dir), "--speculation", "off"])
    assert done.exit_code == 0 and "speculation off, spot training on" in done.output
    assert read_switch(run_dir) == RuntimeSwitch(speculation=False)
    assert runner.invoke(app, ["switch", str(run_dir), "--spot", "no"]).exit_code == 2
    for options in ([], ["--spot", "off"]):
        done = runner.invoke(app, ["switch", str(tmp_path), *options])
        assert done.exit_code == 1 and "is not the trace directory of a run" in done.output


def test_each_replica_is_audited_in_turn():
    names = ["a", "b", "c"]
    asked = [audit_of(step, names, 5, shared=False) for step in (5, 10, 15, 20)]
    assert asked == [Audit(("b",)), Audit(("c",)), Audit(("a",)), Audit(("b",))]
    assert audit_of(6, names, 5, False) == audit_of(5, names, 0, False) == audit_of(5, ["alone"], 5, False) == Audit()


def test_on_a_shared_machine_all_are_audited_and_every_other_time_nobody_trains():
    names = ["a", "b"]
    asked = [audit_of(step, names, 5, shared=True) for step in (5, 6, 10, 15)]
    assert asked == [Audit(("a", "b"), quiet=True), Audit(), Audit(("a", "b")), Audit(("a", "b"), quiet=True)]


def test_the_saving_is_against_the_audited_replicas_own_steps():
    # Stock: a step takes 1 s at batch 1 and 3 s at batch 3, so 2 s at batch 2.
    stock = [(1, 4.0, 4), (3, 6.0, 6)]
    # 8 tokens at batch 2 would be 4 stock steps, 8 s; 3 at batch 1 would be 3 s.
    drafting = [[(2, 5.0, 8)], [(1, 1.6, 3)]]
    saved, compared = audit_saving(stock, drafting)
    assert saved == pytest.approx(1 - 6.6 / 11) and compared == 1.0


def test_loads_that_the_audited_replica_never_had_are_left_out():
    stock = [(1, 2.0, 2), (2, 3.0, 4)]
    saved, compared = audit_saving(stock, [[(1, 1.0, 2), (8, 1.0, 32)]])
    assert saved == pytest.approx(0.5) and compared == 0.5
    assert audit_saving(stock, [[(1, 1.0, 2), (8, 1.5, 32)]]) is None  # most of it cannot be compared
    assert audit_saving([], [[(1, 1.0, 2)]]) is None
    assert audit_saving(stock, []) is None


def test_the_trainer_rests_everybody_when_drafting_is_switched_off(run_dir):
    tmp_path = run_dir
    live = RuntimeControl(str(tmp_path), ["a", "b"], control_every=2)
    assert live.drafting_disabled(1) == [] and live.drafting_disabled(2) == ["b"] == [*live.audit.replicas]
    stats = {"a": EngineStats(work=(Work(1, 0.5, 1),)), "b": EngineStats(work=(Work(1, 1.0, 1),))}
    assert live.report(stats) == pytest.approx(0.5)
    assert live.report(stats) is None  # that audit is over
    write_switch(tmp_path, speculation=False)
    assert live.drafting_disabled(4) == ["a", "b"] and live.audit == Audit()
    (tmp_path / SWITCH_FILE).write_text("speculation: perhaps")
    assert live.drafting_disabled(5) == ["a", "b"], "an unreadable file changes nothing"
    (tmp_path / SWITCH_FILE).write_text("spot: off")
    assert live.drafting_disabled(5) == [] and live.switch == RuntimeSwitch(spot=False)


def test_where_all_are_audited_nothing_was_saved(tmp_path):
    live = RuntimeControl(str(tmp_path), ["a", "b"], control_every=1, shared=True)
    assert live.drafting_disabled(1) == ["a", "b"]
    work = EngineStats(work=(Work(1, 1.0, 1),))
    assert live.report({"a": work, "b": work}) is None and live.audit == Audit()


@pytest.mark.parametrize(("shared", "lost_s"), [(False, 0.2), (True, 0.0)], ids=["its own devices", "shared"])
def test_what_stock_hides_beside_the_model_counts_where_a_core_is_free_for_it(tmp_path, shared, lost_s):
    """A calibration is of one engine alone, whose scheduler has cores to itself."""
    live = RuntimeControl(str(tmp_path), ["a", "b"], control_every=1, shared=shared)
    live.calibrated(Calibration({OFF: [(4, 0.01)]}, stock=((4, 0.008, 0.01),)))
    off = EngineStats(work=(Work(4, 1.0, 400),), load_intervals=(LoadInterval(0.0, 1.0, 4.0, 0.0, 1.0, 100.0, True),))
    saved = live.account({"a": off, "b": off})
    assert saved.rollout_s == pytest.approx(-lost_s)


def test_an_engine_without_an_answer_is_no_audit(tmp_path):
    live = RuntimeControl(str(tmp_path), ["a", "b"], control_every=1)
    live.drafting_disabled(1)
    assert live.report({"a": EngineStats(work=(Work(1, 0.5, 1),)), "b": EngineStats(failure="gone")}) is None
