"""The metric arithmetic, each number worked out by hand."""

from dataclasses import replace

import pytest

from verl_tlt.messages.rollout import DrafterStatus, EngineStats
from verl_tlt.messages.training import BufferStats
from verl_tlt.trace.events import Session
from verl_tlt.trace.metrics import StepObservations, step_line, step_metrics

A = EngineStats(
    num_steps=10, num_decode_tokens=96, num_drafts=40,
    num_draft_tokens_per_pos=(40, 40, 20), num_accepted_tokens_per_pos=(30, 20, 6),
    steps_by_draft_length={-1: 2, 0: 3, 3: 5},
)  # fmt: skip
B = EngineStats(
    num_steps=10, num_decode_tokens=12, num_drafts=10,
    num_draft_tokens_per_pos=(10,), num_accepted_tokens_per_pos=(2,), steps_by_draft_length={1: 10},
)  # fmt: skip


def session(**fields):
    base = {"t": 0.0, "step": 4, "replica": "a", "start": 0.0, "end": 1.0, "steps": 10, "tokens": 100}
    return Session(**(base | {"outcome": "stopped"} | fields))


def of(*replicas, **more):
    """The metrics of a step with these replicas, without their common prefix."""
    found = step_metrics(StepObservations(replicas=dict(zip("ab", replicas, strict=False)), **more))
    return {name.removeprefix("tlt/"): value for name, value in found.items()}


def assert_has(metrics, wanted):
    assert {name: metrics.get(name) for name in wanted} == pytest.approx(wanted)


def test_acceptance_is_weighted_by_tokens_over_replicas():
    metrics = of(A, B)
    assert_has(metrics, {
        "accept_length": 1 + 58 / 50, "accept_rate_pos_1": 32 / 50, "accept_rate_pos_3": 6 / 20,
        "accept_rate_pos_2": 20 / 40,  # offered by the first replica alone
    })  # fmt: skip
    assert "accept_rate_pos_4" not in metrics
    assert of(A, EngineStats()) == of(A), "a replica that slept counts for nothing"


def test_draft_lengths_are_shares_of_engine_steps():
    assert "accept_length" not in of(replace(A, num_drafts=0)), "nothing was drafted"
    metrics = of(A, B)
    shares = {f"draft_length_frac_{k}": share for k, share in enumerate([0.15, 0.5, 0.0, 0.25])}
    mean = (3 * 5 + 10) / 20
    assert_has(metrics, {**shares, "drafter_off_frac": 0.1, "draft_length_mean": mean})
    assert "draft_length_frac_4" not in metrics


def test_a_drafter_that_some_replicas_did_not_load_is_a_failure_of_each_of_them():
    loaded = [DrafterStatus(version=1, ok=ok) for ok in (True, False, True, True)]
    assert_has(of(reloads=loaded, served_version=0), {"reload_failures": 1, "drafter_version": 0})


def test_idle_time_counts_seconds_of_all_replicas_and_one_at_a_time_trains():
    assert_has(of(idle_s={"a": 6.0, "b": 2.0}, trained_s=5.5), {"idle_s": 8, "trained_s": 5.5})
    assert of(idle_s={"a": 0.0})["idle_s"] == 0.0


def test_what_engine_steps_waited_for_us_is_overhead_by_the_slowest_replica():
    metrics = of(replace(A, control_s=0.2), replace(A, control_s=0.3), overhead={"capture": 0.1})
    assert_has(metrics, {"overhead_control_s": 0.3, "overhead_s": 0.4})


def test_drafter_loss_is_weighted_by_tokens_and_leaves_failed_sessions_out():
    sessions = [
        session(loss=2.0, tokens=100),
        session(loss=5.0, tokens=300, skipped=1),
        session(loss=99.0, tokens=900, outcome="failed"),
        session(loss=float("nan"), tokens=900),
    ]
    assert_has(of(sessions=sessions, spot_failures=1), {
        "drafter_loss": (2 * 100 + 5 * 300) / 400, "skipped_steps": 1, "spot_failures": 1,
    })  # fmt: skip


def test_nothing_seen_gives_no_key_and_values_are_finite_floats():
    assert of() == {}
    metrics = of(A, overhead={"capture": float("nan")})
    assert "overhead_s" not in metrics and all(type(value) is float for value in metrics.values())


def test_the_line_of_a_step():
    metrics = {
        "critic/score/mean": 0.9375, "timing_s/gen": 16.03, "tlt/accept_length": 2.314, "tlt/draft_length_mean": 2.25,
        "tlt/drafter_off_frac": 0.15, "tlt/draft_length_frac_0": 0.1, "tlt/idle_s": 7.4, "tlt/trained_s": 5.9,
        "tlt/drafter_version": 4.0, "tlt/saved_estimate_s": -0.25,
    }  # fmt: skip
    assert step_line(metrics, 3, 10) == (
        "step  3/10 | reward 0.94 | rollout 16.0 s | accept 2.31 | K 3.0 (25% without) "
        "| idle 7.4 s, of which 5.9 s trained the drafter | drafter v4 | lost 0.2 s"
    )
    assert step_line({}, 3) == "step 3"
    undrafted = {
        "tlt/draft_length_mean": 0.0, "tlt/drafter_off_frac": 1.0, "tlt/draft_length_frac_0": 0.0,
        "tlt/saved_estimate_s": 0.7,
    }  # fmt: skip
    assert step_line(undrafted, 1) == "step 1 | no drafts", "no savings where nothing was drafted"


def test_what_else_is_counted():
    metrics = of(
        A, buffer=BufferStats(1, responses=4, draftable=3), spot_failures=2, spot_off=True, saved_s=1.5,
        speculation_disabled=False, errors={"end of sampling": 2, "save": 1},
    )  # fmt: skip
    assert_has(metrics, {
        "draft_vocab_coverage": 0.75, "spot_failures": 2, "spot_off": 1, "saved_estimate_s": 1.5,
        "speculation_disabled": 0, "errors": 3, "errors_end_of_sampling": 2,
    })  # fmt: skip
    assert "draft_vocab_coverage" not in of(A, buffer=BufferStats(1))
