"""`python -m benchmarks.lossless` from end to end. Its judge has tests of its own (test_lossless_judge.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lossless.__main__ import SETTINGS, STOPS

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

ROOT = Path(__file__).parents[2]


def test_the_command_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks.lossless", "--draws", "100", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    table = [text for text in done.stdout.splitlines() if text.startswith("| vLLM")]
    assert len(table) == 2 * len(SETTINGS)
    assert all("**differs**" in text for text in table if STOPS in text)
