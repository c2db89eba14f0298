"""From what was seen in one RL step to the numbers in the trainer's logger. Pure: no clock, no files, no Ray.

What could not be measured yields no key: a dashboard shows a gap, never a NaN or an invented zero. What each metric
means stands in docs/metrics.md, one row for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from verl_tlt.messages.rollout import EngineStats, ResponseDrafts
from verl_tlt.messages.training import BufferStats
from verl_tlt.trace.events import Publish, Reload, Session

TAIL = 0.1
"""Share of the responses, the longest ones, that is called the tail."""


@dataclass(frozen=True)
class StepObservations:
    """All that was seen in one RL step. Mappings are by replica; None and empty mean not measured."""

    rollout_s: float | None = None
    """Seconds from the first dispatch to the last response."""
    replicas: Mapping[str, EngineStats] = field(default_factory=dict)
    bubble_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds each replica was empty while another still decoded."""
    bubble_trained_s: Mapping[str, float] = field(default_factory=dict)
    """The part of `bubble_s` in which its spot workers trained."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many each replica has; one where it is not said."""
    devices_trained: Mapping[str, float] = field(default_factory=dict)
    """On how many it trained while it did, on average; one where it is not said."""
    stop_latency_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the stop command to the spot worker's answer."""
    sessions: Sequence[Session] = ()
    publish: Publish | None = None
    reloads: Sequence[Reload] = ()
    overhead: Mapping[str, float] = field(default_factory=dict)
    """Seconds of TLT's own work on the critical path, by what it was: stop, tap, merge, publish, reload, ..."""
    published_version: int | None = None
    """Drafter version the engines should serve after this step."""
    served_version: int | None = None
    """The oldest version that any engine serves after this step."""
    served_since: int | None = None
    """RL step that published the version in `served_version`."""
    step: int | None = None
    """This RL step."""
    spot_failures: int | None = None
    """Sessions that raised or were killed in this step."""
    saved_s: float | None = None
    """Seconds by which the rollout ended earlier than stock's would have (`speculation.baseline`); None: unknown."""
    audit_saved_frac: float | None = None
    """Saving that an audit showed; None: no audit in this step, or too little to compare."""
    errors: Mapping[str, int] | None = None
    """Failures of TLT contained since the run began, by what failed."""


def step_metrics(seen: StepObservations) -> dict[str, float]:
    """The `tlt/*` metrics of one RL step: finite floats."""
    metrics: dict[str, float | None] = {
        **speculation_metrics(list(seen.replicas.values()), seen.rollout_s),
        **_bubble_metrics(seen),
        **_spot_metrics(seen),
        **_drafter_metrics(seen),
        "tlt/saved_s": seen.saved_s,
        "tlt/audit_saved_frac": seen.audit_saved_frac,
        **_error_metrics(seen.errors),
    }
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _error_metrics(errors: Mapping[str, int] | None) -> dict[str, float | None]:
    if errors is None:
        return {}
    kinds = {f"tlt/errors_{what.replace(' ', '_').replace('-', '_')}": float(count) for what, count in errors.items()}
    return {"tlt/errors": float(sum(errors.values())), **kinds}


def speculation_metrics(replicas: Sequence[EngineStats], rollout_s: float | None = None) -> dict[str, float | None]:
    """Acceptance, draft lengths and speed over all engines, weighted by tokens rather than by engine.

    The accept length is tokens per verified draft, the one that the target adds itself included. Where no draft was
    verified it is 1: each pass of the target gave one token, as without speculation. `tlt/tokens_per_pass` is the same
    over all passes, with and without a draft.
    """
    steps = sum(r.num_steps for r in replicas)
    if not steps:
        return {}
    drafts = sum(r.num_drafts for r in replicas)
    accepted = _by_position(r.num_accepted_tokens_per_pos for r in replicas)
    metrics: dict[str, float | None] = {"tlt/accept_length": 1.0 + sum(accepted) / drafts if drafts else 1.0}
    for i, offered in enumerate(_by_position(r.num_draft_tokens_per_pos for r in replicas)):
        if offered:
            metrics[f"tlt/accept_rate_pos_{i + 1}"] = accepted[i] / offered
    if passes := sum(r.num_passes for r in replicas):
        metrics["tlt/tokens_per_pass"] = sum(r.num_decode_tokens for r in replicas) / passes
    metrics["tlt/accept_length_tail"] = accept_length_of_longest((row for r in replicas for row in r.responses), TAIL)
    lengths: dict[int, int] = {}
    for r in replicas:
        for k, count in r.steps_by_draft_length.items():
            lengths[k] = lengths.get(k, 0) + count
    if total := sum(lengths.values()):
        for k in range(max(0, *lengths) + 1):
            metrics[f"tlt/draft_length_frac_{k}"] = lengths.get(k, 0) / total
        metrics["tlt/drafter_off_frac"] = sum(n for k, n in lengths.items() if k < 0) / total
        metrics["tlt/spec_off_frac"] = sum(n for k, n in lengths.items() if k <= 0) / total
        metrics["tlt/draft_length_mean"] = sum(max(k, 0) * n for k, n in lengths.items()) / total
    ngrams = [r for r in replicas if r.num_ngram_drafts is not None]
    if drafts and ngrams:
        found = sum(r.num_ngram_drafts or 0 for r in ngrams)
        metrics["tlt/ngram_draft_frac"] = found / drafts
        metrics["tlt/ngram_accept_rate"] = sum(r.num_ngram_accepted for r in ngrams) / found if found else None
    if rollout_s:
        metrics["tlt/rollout_tok_per_s"] = sum(r.num_generation_tokens for r in replicas) / rollout_s
    metrics["tlt/broken_drafts"] = sum(r.num_broken_drafts for r in replicas)
    return metrics


def accept_length_of_longest(rows: Iterable[ResponseDrafts], share: float) -> float | None:
    """Tokens per verified draft, the target's own included, of the longest responses.

    Args:
        rows: responses by length, of any number of engines (`EngineStats.responses`).
        share: of all responses that is meant; rows on its border count in part.

    Returns:
        1 where nothing was drafted for them; None without a response.
    """
    longest = sorted(rows, key=lambda row: row.num_tokens / row.responses, reverse=True)
    left = share * sum(row.responses for row in longest)
    if not left:
        return None
    drafts = accepted = 0.0
    for row in longest:
        part = min(1.0, left / row.responses)
        drafts += part * row.num_drafts
        accepted += part * row.num_accepted_tokens
        left -= part * row.responses
    return 1.0 + accepted / drafts if drafts else 1.0


def _by_position(counts: Iterable[Sequence[int]]) -> list[int]:
    """Counters per draft position of several engines, added up; an engine that drafted less has fewer of them."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _bubble_metrics(seen: StepObservations) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {}
    if seen.bubble_s:
        bubble, trained = sum(seen.bubble_s.values()), sum(seen.bubble_trained_s.values())
        metrics["tlt/bubble_s"] = bubble
        metrics["tlt/bubble_trained_s"] = trained
        idle = sum(seconds * seen.devices.get(name, 1) for name, seconds in seen.bubble_s.items())
        used = sum(seconds * seen.devices_trained.get(name, 1.0) for name, seconds in seen.bubble_trained_s.items())
        metrics["tlt/bubble_used_frac"] = used / idle if idle > 0 else None
    if seen.stop_latency_s:
        metrics["tlt/stop_latency_s"] = max(seen.stop_latency_s.values())
    overhead = dict(seen.overhead)
    if control_s := max((r.control_s for r in seen.replicas.values()), default=0.0):
        overhead["control"] = control_s
    if overhead:
        metrics["tlt/overhead_s"] = sum(overhead.values())
        metrics |= {f"tlt/overhead_{name}_s": seconds for name, seconds in overhead.items()}
    return metrics


def _spot_metrics(seen: StepObservations) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {"tlt/spot_failures": seen.spot_failures}
    trained = [s for s in seen.sessions if s.steps > 0 and s.outcome != "failed"]
    if seen.sessions:
        metrics["tlt/spot_steps"] = sum(s.steps for s in trained)
        metrics["tlt/spot_tokens"] = sum(s.tokens for s in trained)
        metrics["tlt/spot_judged_s"] = sum(s.judged_s for s in seen.sessions)
        metrics["tlt/spot_skipped_steps"] = sum(s.skipped for s in seen.sessions)
    losses = [(s.loss_last, s.tokens) for s in trained if s.loss_last is not None and math.isfinite(s.loss_last)]
    if weight := sum(tokens for _, tokens in losses):
        metrics["tlt/drafter_loss"] = sum(loss * tokens for loss, tokens in losses) / weight
    return metrics


def _drafter_metrics(seen: StepObservations) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {
        "tlt/drafter_version_published": seen.published_version,
        "tlt/drafter_version": seen.served_version,
    }
    if seen.step is not None and seen.served_since is not None:
        metrics["tlt/drafter_staleness"] = seen.step - seen.served_since
    if seen.publish is not None:
        metrics["tlt/publish_s"] = seen.publish.seconds
        metrics["tlt/publish_skipped"] = 0.0 if seen.publish.decision == "published" else 1.0
        metrics["tlt/drafter_sim_accept_length"] = _served_tau(seen.publish)
        metrics["tlt/gate_gain"], metrics["tlt/gate_gain_low"] = seen.publish.gain, seen.publish.gain_low
    if seen.reloads:
        metrics["tlt/reload_failures"] = sum(not r.ok for r in seen.reloads)
    graphs = [len(r.full_graphs) for r in seen.reloads if r.full_graphs is not None]
    metrics["tlt/full_graph_arms"] = min(graphs, default=None)
    return metrics


def _served_tau(publish: Publish) -> float | None:
    """Held-out accept length of the drafter that is served after the decision."""
    tau = publish.tau
    if publish.decision == "published":
        return tau.get("candidate")
    if publish.decision == "kept":
        return tau.get("served")
    known = [t for t in (tau.get("served"), tau.get("initial")) if t is not None]
    return max(known, default=None)


def buffer_metrics(stats: Iterable[BufferStats], tap_tokens: int) -> dict[str, float]:
    """What several workers' buffers hold, and what each gets of the next step, as metrics; empty without any."""
    held = [s for s in stats if s.bytes]
    if not held:
        return {}
    sequences, nbytes = sum(s.sequences for s in held), sum(s.bytes for s in held)
    return {
        "tlt/buffer_tokens": sum(s.tokens for s in held),
        "tlt/tap_tokens": tap_tokens,
        "tlt/buffer_sequences_per_gb": sequences * 1e9 / nbytes,
    }
