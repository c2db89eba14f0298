"""A run of the demo's recipe and what stops it; here the recipe is a shell script that only writes files."""

import io
import json

import pytest
from rich.console import Console

from demo.command import conclude
from demo.machine import DemoError
from demo.run import MARKER, DemoRun, run_recipe
from demo.screen import Screen


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO(), width=200))


@pytest.fixture
def recipe(tmp_path, made_run):
    """Writes the made-up run's trace."""
    script = tmp_path / "recipe.sh"
    script.write_text(f'echo "steps $STEPS ray \'$RAY_ADDRESS\'"; cp -r {made_run.directory} "$OUT/trace"')
    return script


def test_a_run_ends_with_its_summary_and_no_cluster_of_the_users_is_touched(
    tmp_path, recipe, screen, made_run, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", "1.2.3.4:5")
    run = DemoRun("tlt", tmp_path / "tlt", 6, 0)
    run_recipe(run, recipe, screen)
    assert "steps 6 ray ''" in run.log.read_text()
    conclude(screen.console, tmp_path, 12.0, run)
    result = json.loads((tmp_path / "summary.json").read_text())
    assert result["seconds"] == 12.0 and len(result["steps"]) == 6
    assert result["steps"][5]["accept_length"] == pytest.approx(made_run.accept_length[6])
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("program", "stall_s", "said"),
    [
        ("echo 'ValueError: x is wrong'; exit 3", 60.0, r"(?s)exit status 3. Cause: ValueError: x is wrong.*verl\.log"),
        ("", 60.0, "ended after 6 of 7 steps"),
        ("sleep 60", 0.5, "the run hangs"),
    ],
)
def test_a_run_that_fails_stops_early_or_hangs_is_an_error(tmp_path, recipe, screen, program, stall_s, said):
    recipe.write_text(program or recipe.read_text())
    with pytest.raises(DemoError, match=said):
        run_recipe(DemoRun("a run", tmp_path / "out", steps=7, seed=0), recipe, screen, stall_s=stall_s)


def test_a_folder_of_the_users_is_not_emptied(tmp_path, recipe, screen):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("")
    with pytest.raises(DemoError, match="was not made by the demo"):
        run_recipe(DemoRun("a run", out, steps=6, seed=0), recipe, screen)
    assert (out / "thesis.txt").exists()
    (out / MARKER).touch()
    run_recipe(DemoRun("a run", out, steps=6, seed=0), recipe, screen)
    assert not (out / "thesis.txt").exists()
