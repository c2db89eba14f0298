"""`benchmarks.gpu` at toy size: every part runs here, before it costs minutes of a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.control.drains import OURS
from benchmarks.gpu.engines import ENVIRONMENT
from benchmarks.gpu.parts import FINDINGS, of_clone
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.child_engine import SPAWNED

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

ROOT = Path(__file__).parents[2]


def run(module, *arguments):
    command = [sys.executable, "-m", module, "--tiny", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_quarter_of_an_hour_ends_with_a_report_of_each_part(tmp_path):
    run("benchmarks.gpu", "--minutes", 25, "--out", tmp_path)
    parts = {file.stem: json.loads(file.read_text())["parts"][file.stem] for file in tmp_path.glob("*.json")}
    assert all(file.stat().st_size for file in tmp_path.iterdir())
    assert parts.keys() == {"numerics", "stop", "small", "sync", "race"}
    assert all("found" in part and "error" not in part for part in parts.values()), parts
    training = [parts["numerics"]["found"], *parts["stop"]["found"]["sessions"]]
    assert all(each["draft_positions"] == 3 for each in training), "as once drafts are accepted"
    sleep, nan, distribution = (parts["small"]["found"][name] for name in ("sleep", "nan", "distribution"))
    assert sleep["lost"] and sleep["reload_is_exact"] and nan["drafts_verified"] > 0
    assert all(distribution[f"{which}_against_plain"]["p"] > 1e-5 for which in ("drafted", "drawn", "plain"))
    assert distribution["uniform_share"] > 0.9, "FULL graphs are for steps that only verify drafts"
    sync = parts["sync"]["found"]
    assert any(session["steps"] for session in sync["sessions"]) and all(load["ok"] for load in sync["reloads"])
    assert sync["reloads"][-1]["version"] > 0, "what the session made is loaded"
    race = parts["race"]["found"]
    assert race["policy"] == OURS, "the arm of that name must not have a fixed K"
    assert race["sleep_7b"]["lost"] and race["sleep_7b"]["reload_is_exact"]
    assert not race["rounds"][0]["synthetic"], "the CPU's sampler accepts by the policy alone"


BROKEN = """
import asyncio, json, sys
from pathlib import Path
from benchmarks.gpu import engine as parts
from benchmarks.gpu.engines import K_MAX, accepted, hold, in_worker
from benchmarks.gpu.parts import Bench


class Short(Bench):
    def left(self):
        return 60.0


def break_pass(worker):
    worker.tlt_pass._propose = None  # a call raises


async def distribution(bench, engine):
    await hold(engine, K_MAX)
    await in_worker(engine, break_pass)
    await accepted(engine)


async def sleep(bench, engine):
    await asyncio.Event().wait()


parts.distribution, parts.sleep = distribution, sleep
print(json.dumps(asyncio.run(parts.small(Short(True, Path(sys.argv[1]))))))
"""


def test_checks_that_hang_or_have_no_drafter_are_told_and_cost_no_other(tmp_path):
    (directory := tmp_path / "small").mkdir()
    environment = {**SPAWNED, **os.environ, **of_clone({**CPU_ENGINE, **ENVIRONMENT})}
    command = [sys.executable, "-c", BROKEN, str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "pass failed" in found["distribution"]["error"] and "pass failed" in found["nan"]["error"]
    assert "TimeoutError" in found["sleep"]["error"]
    assert json.loads((directory / FINDINGS).read_text()) == found


def test_the_part_that_is_not_in_it_finds_something(tmp_path):
    run("benchmarks.gpu.drafter", "--parts", "speed", "--out", tmp_path / "report.json", "--budget", 1200)
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["speed"]
    assert "error" not in part and all(step["tokens_per_s"] > 0 for step in part["found"]["steps"])
