"""`verl-tlt report` as a user calls it."""

import sys

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app


def test_page_and_picture_are_where_they_are_wanted(made_run, tmp_path):
    done = CliRunner().invoke(app, ["report", str(made_run.directory), "--out", str(tmp_path / "here")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"picture.png", "report.html"}


def test_no_trace_is_one_sentence(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1) and str(tmp_path) in done.output


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_what_is_missing_is_one_sentence_after_table_and_timeline(made_run, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    timeline, out = tmp_path / "t.json", tmp_path / "out"
    done = CliRunner().invoke(app, ["report", str(made_run.directory), "--out", str(out), "--perfetto", str(timeline)])
    assert done.exit_code == 1 and "accept" in done.output and timeline.exists() and not out.exists()
    assert f"verl-tlt report needs {package}, which is not installed: pip install 'verl-tlt[report]'.\n" in done.output
