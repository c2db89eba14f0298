"""The GPU benchmark's frame: parts that fail cost nothing but themselves; and its test of two samples can fail."""

import argparse
import importlib
import json
import random
import time

import pytest

import benchmarks.gpu.__main__ as quarter_of_an_hour
from benchmarks.gpu.chi_square import chi_square, compare
from benchmarks.gpu.parts import Part, run

MODULE = """
import os, signal, time
from benchmarks.gpu.parts import Part, main

async def late(bench):
    return {"device": bench.device}

def hangs_later(bench):
    bench.note(first=1)
    bench.note(second=2)
    time.sleep(60)

def ignores(bench):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

def fails(bench):
    raise ValueError("no such kernel")

PARTS = {
    "works": Part(lambda bench: {"tiny": bench.tiny}, 0), "waits": Part(late, 0), "fails": Part(fails, 0),
    "dies": Part(lambda bench: os._exit(9), 0), "hangs": Part(lambda bench: time.sleep(60), 0),
    "long": Part(dict, 1e6), "shy": Part(hangs_later, 0, most_s=2), "ignores": Part(ignores, 0),
}

if __name__ == "__main__":
    main("made_parts", PARTS, "Parts of a test.")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Parts that a child can import; in the parent only their names count."""
    (tmp_path / "made_parts.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "made_parts"


NOTHING = Part(dict, 0.0)


def test_what_a_part_does_stays_with_it(module, tmp_path, capsys):
    parts = dict.fromkeys(("fails", "dies", "works", "waits"), NOTHING)
    parts["long"] = Part(dict, 1e6)
    options = argparse.Namespace(tiny=True, budget=60.0, out=tmp_path / "report.json")
    run(module, parts, tmp_path, options)
    report = json.loads(options.out.read_text())
    found = report["parts"]
    assert list(found) == list(parts) and all("seconds" in part for part in found.values())
    assert "ValueError: no such kernel" in found["fails"]["error"] and "ended early" in found["dies"]["error"]
    assert found["works"]["found"] == {"tiny": True} and found["waits"]["found"] == {"device": "cpu"}
    assert "of the budget were left" in found["long"]["skipped"]
    machine = report["machine"]
    assert {"gpu", "cpu", "cpu_flags", "cores", "versions", "commit"} <= machine.keys() and machine["versions"]["torch"]
    assert capsys.readouterr().out.count("\n") == len(parts)


def quarter(module, tmp_path, stages, seconds):
    out = tmp_path / "out"
    out.mkdir()
    began = time.monotonic()
    stages = [dict.fromkeys(stage, module) for stage in stages]
    reports = quarter_of_an_hour.run(stages, out, tmp_path / "scratch", began + seconds, tiny=True)
    return reports, time.monotonic() - began


def test_a_part_that_hangs_costs_its_own_time_and_keeps_what_it_found(module, tmp_path):
    reports, _ = quarter(module, tmp_path, [["shy", "works"], ["waits"]], 120.0)
    assert reports["shy"]["found"] == {"first": 1, "second": 2} and "not done after 8 s" in reports["shy"]["error"]
    assert reports["works"]["found"] == {"tiny": True} and reports["waits"]["found"] == {"device": "cpu"}


def test_the_minutes_are_kept_whatever_a_part_does(module, tmp_path, monkeypatch):
    monkeypatch.setattr(quarter_of_an_hour, "END_S", 2.0)
    reports, took = quarter(module, tmp_path, [["ignores"]], 8.0)
    assert "error" in reports["ignores"] and took < 12.0


def test_every_part_of_the_quarter_of_an_hour_exists_and_fits_its_minutes():
    least = 0.0
    for stage in quarter_of_an_hour.STAGES:
        parts = [importlib.import_module(module).PARTS[name] for name, module in stage.items()]
        least += max(part.least_s for part in parts)
    assert least < 12 * 60


def drawn(count, weights, seed):
    return [[token] for token in random.Random(seed).choices(range(len(weights)), weights, k=count)]


def test_samples_of_one_distribution_pass_and_others_do_not():
    weights = [8, 4, 2, 1, 1, 0.01]
    same = chi_square(drawn(4000, weights, 1), drawn(2000, weights, 2))
    assert same["p"] > 1e-3 and same["freedom"] == 5  # the rare token is in a cell of its own kind
    assert chi_square(drawn(4000, weights, 1), drawn(4000, [8, 4, 2, 2, 1, 0.01], 2))["p"] < 1e-6


def test_outputs_whose_tokens_hang_together_otherwise_are_told_apart():
    draws = random.Random(0)
    alone, other = ([[draws.randrange(4), draws.randrange(4), 7] for _ in range(4000)] for _ in range(2))
    hanging = [[x, x if draws.random() < 0.15 else draws.randrange(4), 7] for x, _, _ in other]
    assert compare(alone, other)["p"] > 1e-3
    found = compare(alone, hanging)
    assert found["p"] < 1e-6 and all(found["tests"][f"token {i}"]["p"] > 1e-3 for i in range(3))
