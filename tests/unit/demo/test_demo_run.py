"""A run of the demo's recipe and what stops it; here the recipe is a shell script that only writes files."""

import io
import json

import pytest
from rich.console import Console

from demo.__main__ import grpo
from demo.machine import DemoError

STEPS = 3
GIVEN = {"STEPS": str(STEPS)}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def recipe(tmp_path):
    """Writes the metrics of three steps, as verl's file logger does."""
    rows = [{"step": step, "data": {"timing_s/step": 4.0, "tlt/accept_length": 1.0 + step}} for step in range(1, 4)]
    script, metrics = tmp_path / "recipe.sh", tmp_path / "metrics"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script.write_text(f'echo "steps $STEPS ray \'$RAY_ADDRESS\'"; cp {metrics} "$VERL_FILE_LOGGER_PATH"')
    return script


def test_each_step_has_a_line_and_no_cluster_of_the_users_is_touched(tmp_path, recipe, console, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "1.2.3.4:5")
    grpo(console, tmp_path / "tlt", STEPS, GIVEN, recipe)
    assert "steps 3 ray ''" in (tmp_path / "tlt" / "verl.log").read_text()
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split(" | ") for line in lines] == [[f"step {n}/3", f"accept {n + 1:.2f}"] for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 'ValueError: x is wrong'; exit 3", r"(?s)exit status 3. Cause: ValueError: x is wrong.*verl\.log"),
        ("", "ended after 3 of 4 steps"),
    ],
)
def test_a_run_that_fails_or_stops_early_is_an_error(tmp_path, recipe, console, program, said):
    recipe.write_text(program or recipe.read_text())
    with pytest.raises(DemoError, match=said):
        grpo(console, tmp_path / "out", STEPS + 1, GIVEN, recipe)


def test_a_folder_of_the_users_is_not_emptied(tmp_path, recipe, console):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("")
    with pytest.raises(DemoError, match="was not made by the demo"):
        grpo(console, out, STEPS, GIVEN, recipe)
    assert (out / "thesis.txt").exists()
    (out / "verl.log").touch()
    grpo(console, out, STEPS, GIVEN, recipe)
    assert not (out / "thesis.txt").exists()
