"""`benchmarks.gpu` from end to end at toy size: every part runs here, and none claims what only a GPU can tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report_of(tmp_path_factory):
    """The report of one of the two commands, each run once."""
    made = {}

    def report(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "report.json"
            command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--tiny", "--out", str(out), "--budget", "1200"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1300)
            assert done.returncode == 0, done.stderr[-2000:]
            made[name] = json.loads(out.read_text())
        return made[name]

    return report


def found(report, part):
    assert "found" in report["parts"][part], report["parts"][part]
    return report["parts"][part]["found"]


def test_the_drafters_parts(report_of):
    report = report_of("drafter")
    assert list(report["parts"]) == ["numerics", "speed", "residency_7b", "stop", "scoring", "residency_32b"]
    numerics = found(report, "numerics")
    assert {"fc.weight", "layers.0.mlp.down_proj.weight"} <= numerics["relative_error"].keys()
    assert 0 < numerics["largest_error"] < 1e-4 and numerics["fingerprint_is_the_same"]
    speed = found(report, "speed")
    assert len(speed["steps"]) == 16 and {s["rows"] for s in speed["steps"]} == {64, 56, 48, 40, 256}
    assert all(s["graphs"] == 0 and not s["skipped"] for s in speed["steps"])
    for part in ("residency_7b", "residency_32b"):
        stay = found(report, part)
        for turn in stay["turns"]:
            assert {"there": turn["there_bytes"], "back": turn["back_bytes"]} == stay["planned"]
            assert turn["times"] == "needs CUDA"
    sessions = found(report, "stop")["sessions"]
    assert len(sessions) == 3
    assert all(s["outcome"] == "stopped" and s["steps"] and 0 <= s["stop_latency_s"] < 5 for s in sessions)
    assert len(found(report, "scoring")["turns_s"]) == 3 and found(report, "scoring")["peak_gib"] == "needs CUDA"


def test_the_engines_parts(report_of):
    report = report_of("engine")
    sleep = found(report, "sleep")
    assert sleep["sleep"] == "needs CUDA" and sleep["lost"] and sleep["fingerprint_is_the_same"]
    assert any("cos_sin_cache" in name for name in sleep["overwritten"])
    assert 0.02 < sleep["accepted_before"][0] < 1
    assert sleep["accepted_after"][0] == pytest.approx(sleep["accepted_before"][0], abs=0.1)
    nan = found(report, "nan")
    assert len(nan["filled"]) == 1 and nan["broken_drafts"] > 0
    assert nan["token_0_share_with_nan_drafter"] == pytest.approx(nan["token_0_share_without_drafter"], abs=0.1)
    distribution = found(report, "distribution")
    for which in ("drafted_against_plain", "plain_against_plain"):
        assert distribution[which]["p"] > 1e-5
        assert sum(test["freedom"] for test in distribution[which]["tests"].values()) > 10
    assert distribution["accepted"][0] > 0


def test_the_engines_costs_and_a_session_beside_it(report_of):
    report = report_of("engine")
    tlt = found(report, "costs_tlt")
    assert set(tlt["wall_ms"]) == {"off", "K=0"} and set(tlt["engine_ms"]) == {"off", "K=0", "K=1", "K=2", "K=3"}
    assert all(len(turns) == 3 for arm in tlt["engine_ms"].values() for turns in arm.values())
    assert set(found(report, "costs_stock_v1")["wall_ms"]["stock"]) == {"1", "2"}
    assert all(report["parts"][part]["needs"] == "CUDA" for part in ("costs_stock_v2", "costs_tlt_longest_graphs"))
    beside = found(report, "beside")
    assert beside["decodes_afterwards"] and beside["memory_gib"]["awake"] == "needs CUDA"
    assert all(s["outcome"] == "stopped" for s in beside["session"]["found"]["sessions"])
