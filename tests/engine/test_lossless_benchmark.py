"""`benchmarks.lossless` on real engines: what is exact passes. What does not, the judge's own tests have."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from draws import PROMPTS
from transformers import AutoTokenizer

from benchmarks.lossless.__main__ import SETTINGS, STOPS, row_of
from benchmarks.lossless.child import responses
from benchmarks.lossless.exact import Exact

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SMALL = {"family": "qwen3-small", "max_num_seqs": 64, "logprobs_mode": "processed_logprobs"}
NAMES = ("T=1", STOPS)
ASKED = {
    "prompts": [list(prompt) for prompt in PROMPTS], "draws": 800, "tokens": 10,
    "settings": {name: asdict(SETTINGS[name]) for name in NAMES}, "stops": {STOPS: None},
}  # fmt: skip


def test_with_tlt_every_row_passes(engine_of, models):
    target = models["qwen3-small-target"]
    exact, tokenizer = Exact(target), AutoTokenizer.from_pretrained(target)
    with engine_of("good", policy="policies:rand", **SMALL) as engine:
        engine.end_at_stop_strings()
        found = responses(engine.llm, ASKED)
    for name in NAMES:
        row = row_of(("", name), found[name], PROMPTS, SETTINGS[name], exact, ASKED["tokens"], tokenizer)
        assert row.passes, row
        assert row.accepted > 0.3 and row.power > 0.5 and row.logprob_error < 1e-3


@pytest.mark.heavy
def test_the_command_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks.lossless", "--draws", "100", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    table = [text for text in done.stdout.splitlines() if text.startswith("| vLLM")]
    assert len(table) == 2 * len(SETTINGS)
    assert all("**differs**" in text for text in table if STOPS in text)
