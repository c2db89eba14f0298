"""A real run that drafts without a drafter and trains none: what engines without a tap get; the paper's TLT-Base."""

import pytest
from grpo_run import TLT, Run, grpo

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Three steps with n-grams alone; in the second one replica is audited."""
    base = tmp_path_factory.mktemp("alone")
    return grpo(
        base / "run", base / "assets", 3, *TLT, "tlt.spot.enable=false", "tlt.speculation.source=ngram",
        "tlt.speculation.audit_every=2", long=lambda index: index % 2 == 0, timeout=420, SAVE_FREQ="-1",
    )  # fmt: skip


def test_n_grams_alone_are_drafted_and_verified(run):
    for step in (1, 3):
        assert 0.0 < run.steps[step]["tlt/ngram_draft_frac"] <= 1.0  # a request without a match drafts nothing
        assert run.steps[step]["tlt/ngram_accept_rate"] > 0.2
        assert 1.0 < run.steps[step]["tlt/accept_length"] <= 3.0


def test_the_audited_replica_drafts_nothing(run):
    assert run.steps[2]["tlt/spec_off_frac"] > run.steps[1]["tlt/spec_off_frac"]


def test_nothing_is_trained_and_nothing_fails(run):
    assert not run.trace.sessions
    assert not (run.out / "drafter").exists()
    for step, metrics in run.steps.items():
        assert metrics["tlt/errors"] == 0.0, step
        assert metrics.get("tlt/bubble_trained_s", 0.0) == 0.0
        assert metrics["training/rollout_probs_diff_max"] < 1e-4, step
        assert metrics["response_length/max"] == 600.0
        assert metrics["response_length/min"] == 40.0
