"""The switch in a file, and the command that writes it."""

import pytest
from typer.testing import CliRunner

from verl_tlt.trainer import runtime_switch
from verl_tlt.trainer.runtime_switch import SWITCH_FILE, RuntimeSwitch, SwitchError, read_switch, write_switch


def test_switches_are_written_one_by_one_and_read_back(run_dir):
    write_switch(run_dir, speculation=False)
    assert write_switch(run_dir, spot=False, speculation=None) == RuntimeSwitch(False, False) == read_switch(run_dir)
    assert write_switch(run_dir, speculation=True) == RuntimeSwitch(True, False) == read_switch(run_dir)
    assert sorted(p.name for p in run_dir.iterdir()) == [SWITCH_FILE, runtime_switch.TRACE_FILE]
    modes = {(run_dir / name).stat().st_mode for name in (SWITCH_FILE, runtime_switch.TRACE_FILE)}
    assert len(modes) == 1, "the switch is as readable as anything else in the trace"


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
        ("off", "must hold lines such as"),
        ("spot: 2026-13-45", "cannot be read"),
        ("spot: !!bool perhaps", "cannot be read"),
        ("a: b: c", "cannot be read"),
        ("[" * 3000 + "]" * 3000, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_understood_names_itself(tmp_path, text, said):
    (tmp_path / SWITCH_FILE).write_text(text)
    with pytest.raises(SwitchError, match=said) as error:
        read_switch(tmp_path)
    assert SWITCH_FILE in str(error.value)


def test_the_command_switches_and_says_what_is_on(run_dir, tmp_path):
    from verl_tlt.commands.cli import app

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
