"""`benchmarks.gpu` from end to end at toy size: every part runs here, and none claims what only a GPU can tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

ROOT = Path(__file__).parents[2]


def found(report, part):
    assert "found" in report["parts"][part], report["parts"][part]
    return report["parts"][part]["found"]


def run(name, tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--tiny", "--out", str(out), "--budget", "1200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def judge_small(small):
    sleep, nan, distribution = small["sleep"], small["nan"], small["distribution"]
    assert sleep["memory_gib"]["asleep"] == "needs CUDA" and sleep["lost"] and sleep["reload_is_exact"]
    assert sleep["accepted_after"][0] == pytest.approx(sleep["accepted_before"][0], abs=0.1)
    assert nan["drafts_verified"] > 0
    assert nan["token_0_share_with_nan_drafter"] == pytest.approx(nan["token_0_share_without_drafter"], abs=0.1)
    samples = ("drafted_against_plain", "drawn_against_plain", "plain_against_plain")
    assert all(distribution[which]["p"] > 1e-5 for which in samples)
    assert len(distribution["steps_by_drawn_length"]) > 2, "lengths were to vary"


def judge_race(race):
    (one,) = race["rounds"]
    assert {*one["good"]} == {*one["fair"]} == {*(f"vllm-k{k}" for k in range(1, 8)), "live_table"}
    assert not one["synthetic"], "the CPU's sampler accepts by the policy alone"
    assert all("In 1 rounds" in said and "not claimed" in said for said in race["verdict"].values())
    assert {*race["costs_ms"]} == {"-1", *map(str, range(8))} and race["costs"]
    assert race["sleep_7b"]["lost"] and race["sleep_7b"]["reload_is_exact"]


def test_the_quarter_of_an_hour_ends_with_a_report_of_each_part(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes", "25", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stderr[-2000:]
    files = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    reports = {name: file["parts"][name] for name, file in files.items()}
    assert {*reports} == {"numerics", "stop", "small", "sync", "race"} <= {*done.stdout.split()}
    assert all("error" not in report for report in reports.values()), reports
    judge_small(reports["small"]["found"])
    judge_race(reports["race"]["found"])
    assert len(reports["sync"]["found"]["steps"]) == 2


def test_the_drafters_parts(tmp_path):
    report = run("drafter", tmp_path)
    parts = ["numerics", "speed", "residency_7b", "stop", "successor", "scoring", "residency_32b"]
    assert list(report["parts"]) == parts
    numerics = found(report, "numerics")
    assert 0 < numerics["largest_error"] < 1e-4
    speed = found(report, "speed")
    assert all(s["graphs"] == 0 and not s["skipped"] for s in speed["steps"])
    assert {s["passes"] for s in speed["steps"]} == {1, 3} and len(speed["by_attention"]) == 2
    for part in ("residency_7b", "residency_32b"):
        stay = found(report, part)
        for turn in stay["turns"]:
            assert {"there": turn["there_bytes"], "back": turn["back_bytes"]} == stay["planned"]
            assert turn["times"] == "needs CUDA"
    assert all(s["outcome"] == "stopped" and s["steps"] for s in found(report, "stop")["sessions"])
    successor = found(report, "successor")
    assert successor["killed_with"] == -9 and successor["first_session"]["outcome"] == "stopped"
    for part in ("speed", "stop", "scoring"):
        assert found(report, part)["planned_gib"] > 0
    assert found(report, "scoring")["peak_gib"] == found(report, "stop")["peak_gib"] == "needs CUDA"


def test_the_engines_parts(tmp_path):
    report = run("engine", tmp_path)
    judge_small(found(report, "small"))
    lora = found(report, "lora")
    assert lora["reload_error"] is None and lora["drafted_against_plain"]["p"] > 1e-5
    assert lora["accepted_after"][0] == pytest.approx(lora["accepted_before"][0], abs=0.1) and lora["accepted_after"][0]
    tlt = found(report, "costs_tlt")
    assert set(tlt["wall_ms"]) == {"off", "K=0"} and set(tlt["engine_ms"]) == {"off", *(f"K={k}" for k in range(8))}
    assert set(found(report, "costs_stock_v1")["wall_ms"]["stock"]) == {"1", "2"}
    assert report["parts"]["costs_stock_v2"]["needs"] == "CUDA"
    judge_race(found(report, "race"))
    beside = found(report, "beside")
    assert beside["decodes_afterwards"] and beside["memory_gib"]["awake"] == "needs CUDA"
    assert all(s["outcome"] == "stopped" for s in beside["session"]["found"]["sessions"])


def test_the_jobs_parts(tmp_path):
    """On the CPU the wide engine has two workers that share two cores."""
    report = run("job", tmp_path)
    sync, nan, cold = (found(report, part) for part in ("sync", "nan", "cold_start"))
    assert (sync["replicas"], sync["tensor_parallel"], sync["memory_gib"]) == (1, 2, "needs CUDA")
    for part, steps in ((sync, ["1", "2"]), (nan, ["1", "2", "3"]), (cold, ["1", "2", "3", "4"])):
        assert list(part["steps"]) == steps
        assert all(reload["ok"] for reload in part["reloads"])
        assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in part["steps"].values())
    waited = [step.get("tlt/overhead_cold_start_s", 0.0) for step in cold["steps"].values()]
    assert waited[2] > 0.0 == waited[0] and any(session["step"] == 3 for session in cold["sessions"])
