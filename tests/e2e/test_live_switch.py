"""A real run that drafts from n-grams beside the drafter, and is told on the way to stop all of it."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from grpo_run import TLT, Run, grpo

pytestmark = pytest.mark.e2e

LIMIT_S = 420.0
STEPS = 5


def switch_off_after(step: int, out: Path, said: list[str]) -> threading.Thread:
    """Call `verl-tlt switch`, as a user would from another shell, once this step has ended."""

    def work() -> None:
        metrics, deadline = out / "metrics.jsonl", time.time() + LIMIT_S
        while time.time() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
            time.sleep(0.1)
        verl_tlt = Path(sys.executable).parent / "verl-tlt"
        command = [str(verl_tlt), "switch", str(out / "trace"), "--speculation", "off", "--spot", "off"]
        said.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Run, str]:
    """Five steps, switched off after the second: the third may have begun by then."""
    base = tmp_path_factory.mktemp("switch")
    said: list[str] = []
    thread = switch_off_after(2, base / "run", said)
    done = grpo(
        base / "run", base / "assets", STEPS, *TLT, "tlt.speculation.source=both", timeout=LIMIT_S, SAVE_FREQ="-1"
    )
    thread.join(10)
    return done, said[0]


def test_n_grams_draft_beside_the_drafter(run):
    metrics = run[0].steps[2]
    assert 0.0 < metrics["tlt/ngram_draft_frac"] < 1.0
    assert 0.0 <= metrics["tlt/ngram_accept_rate"] <= 1.0
    assert metrics["tlt/draft_length_frac_2"] > 0.5


def test_the_switch_stops_drafting_and_training_and_not_the_run(run):
    done, said = run
    assert said == "speculation off, spot training off"
    assert sorted(done.steps) == list(range(1, STEPS + 1))
    for step in (4, 5):
        assert done.steps[step]["tlt/drafter_off_frac"] == 1.0
        assert done.steps[step]["tlt/accept_length"] == 1.0
        assert done.steps[step].get("tlt/bubble_trained_s", 0.0) == 0.0
    assert {s.step for s in done.trace.sessions if s.steps} <= {2, 3}
    assert "TLT was switched from outside" in done.log


def test_nothing_else_changed(run):
    for step, metrics in run[0].steps.items():
        assert metrics["tlt/errors"] == 0.0, step
        assert metrics["training/rollout_probs_diff_max"] < 1e-4, step
        assert metrics["response_length/max"] == 600.0
        assert metrics["response_length/min"] == 40.0
