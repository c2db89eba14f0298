"""`verl-tlt report` as a user calls it."""

import sys

from typer.testing import CliRunner

from verl_tlt.cli import app


def test_page_and_picture_are_where_they_are_wanted(made_run, tmp_path):
    done = CliRunner().invoke(app, ["report", str(made_run.directory), "--out", str(tmp_path / "here")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"picture.png", "report.html"}


def test_no_trace_is_one_sentence(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1) and str(tmp_path) in done.output


def test_without_matplotlib_only_the_picture_is_missing(made_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(made_run.directory), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "The picture needs matplotlib, which is not installed: pip install 'verl-tlt[report]'.\n" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"report.html"}
