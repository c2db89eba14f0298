"""A run of a recipe, from its first line to the summary; the recipe is a shell script that only writes files."""

import io
import json

import pytest
from rich.console import Console

from demo import command, warmup
from demo.command import PROOF, conclude, demo, gain
from demo.machine import DemoError, Machine, find_dtype
from demo.run import MARKER, DemoRun, run_recipe
from demo.screen import Screen
from demo.toy.assets import build_assets, demo_width


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO(), width=200))


@pytest.fixture
def recipe(tmp_path, made_run):
    """Writes the made-up run's trace."""
    script = tmp_path / "recipe.sh"
    script.write_text(f"""
        echo "steps $STEPS seed $SEED drafter '$DRAFTER' $GREETING ray '$RAY_ADDRESS' dtype $DTYPE"
        cp -r {made_run.directory} "$OUT/trace"; mkdir "$OUT/drafter"
    """)
    return script


def shown(screen):
    return screen.console.file.getvalue()


def test_a_run_prints_a_line_per_step(tmp_path, recipe, screen, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "1.2.3.4:5")
    run = DemoRun("a run", tmp_path / "out", steps=6, seed=7, env={"GREETING": "hello"})
    run_recipe(run, recipe, screen)
    lines = [line.split(" |")[0] for line in shown(screen).splitlines() if line.startswith("step")]
    assert lines == [f"step {i}/6" for i in range(1, 7)]
    assert "steps 6 seed 7 drafter '' hello ray ''" in run.log.read_text()


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


def test_a_run_ends_with_summary_report_and_command(tmp_path, recipe, screen, made_run):
    run = DemoRun("tlt", tmp_path / "tlt", 6, 0, env={"POLICY": "toy"})
    run_recipe(run, recipe, screen)
    conclude(screen.console, tmp_path, 12.0, run)
    result = json.loads((tmp_path / "summary.json").read_text())
    assert result["seconds"] == 12.0 and len(result["steps"]) == 6
    assert result["steps"][5]["accept_length"] == pytest.approx(made_run.accept_length[6])
    assert "vllm serve toy" in (tmp_path / "report.html").read_text()
    assert f'--speculative-config \'{{"method": "eagle3", "model": "{made_run.directory / "drafter"}"' in shown(screen)


@pytest.fixture
def here(recipe, monkeypatch):
    """The demo's recipe and a machine that is large enough."""
    monkeypatch.setattr(command, "RECIPE", recipe)
    monkeypatch.setattr(command, "find_machine", lambda: Machine(memory_gb=32.0, cores=2.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_says_in_which_dtype_it_computes_and_does(tmp_path, here, capsys, monkeypatch, dtype):
    monkeypatch.setattr(command, "find_dtype", lambda: dtype)
    assert demo(against_stock=False, steps=6, out=tmp_path / "out", seed=0, from_scratch=True) == 0
    assert f"Computing in {dtype}: this processor" in capsys.readouterr().out
    assert f"dtype {dtype}\n" in (tmp_path / "out" / "tlt" / "verl.log").read_text()
    assert (tmp_path / "out" / "assets" / f"policy-{demo_width(dtype)}").is_dir()


@pytest.fixture
def warmup_program(tmp_path, monkeypatch):
    """A program in place of `verl-tlt warmup`, which notes its calls and writes a drafter's directory."""
    program, calls = tmp_path / "bin" / "verl-tlt", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
        echo "$@" >> {calls}
        while [ "$1" != --out ]; do shift; done
        echo "train:  50 %  step 3"; [ -z "$FAILS" ] || {{ echo "DrafterError: too short"; exit 1; }}
        mkdir "$2"; echo '{{"tau_sim": 4.25}}' > "$2/provenance.json"
    """)
    program.chmod(0o755)
    monkeypatch.setattr(warmup.sys, "executable", str(program.with_name("python")))
    return calls


def test_the_demo_warms_up_a_drafter_once_and_drafts_with_it(tmp_path, here, capsys, monkeypatch, warmup_program):
    out = tmp_path / "out"
    monkeypatch.setenv("FAILS", "1")
    assert demo(against_stock=False, steps=None, out=out, seed=0) == 1
    assert "The warm-up failed" in (said := capsys.readouterr().out) and "too short" in said
    monkeypatch.setenv("FAILS", "")
    assert demo(against_stock=False, steps=None, out=out, seed=0) == 0
    assert "accept length 4.25 on held-out prompts" in (said := capsys.readouterr().out)
    assets = build_assets(out / "assets", width=demo_width(find_dtype()))
    drafter = warmup.warm_up(assets, Screen(Console(file=io.StringIO())))
    assert len(warmup_program.read_text().splitlines()) == 2, "one that failed, one for the run, and none after it"
    assert f"drafter '{drafter}'" in (out / "tlt" / "verl.log").read_text()
    assert PROOF in said.replace("\n", " "), "it ends with what it came to"


def test_the_gain_is_of_the_steps_whose_savings_are_known():
    row = {"rollout_s": 10.0, "tokens": 3000, "saved_s": 5.0}
    known = {3: row, 4: {"rollout_s": 10.0, "tokens": 2000, "saved_s": 11.0}}
    rows = {1: row | {"saved_s": None}, 2: row | {"tokens": 900, "saved_s": None}, **known}
    assert gain(rows).startswith("250 tokens/s in the rollouts of steps 3, 4, about 1.8 times")
    assert "does not know" in gain({1: row | {"saved_s": None}}) and PROOF in gain({})
