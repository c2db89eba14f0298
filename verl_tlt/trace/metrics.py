"""Computes the `tlt/*` metrics of an RL step, and the line that is printed of them.

docs/metrics-and-troubleshooting.md has a row for each.

What could not be measured gets no key, so a dashboard shows a gap, never a NaN or a zero.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from verl_tlt.messages.rollout import EngineStats, accept_length
from verl_tlt.messages.training import BufferStats
from verl_tlt.trace.events import Publish, Reload, Session


@dataclass
class StepObservations:
    """What was measured in one RL step. Mappings are by replica; None and empty mean not measured."""

    replicas: Mapping[str, EngineStats] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds in which a replica had nothing to decode while another still decoded."""
    trained_s: float | None = None
    """Seconds of idle time in which the spot trainer trained the drafter; one replica at a time lends its device."""
    sessions: list[Session] = field(default_factory=list)
    publish: Publish | None = None
    reloads: Sequence[Reload] = ()
    overhead: dict[str, float] = field(default_factory=dict)
    """Seconds of TLT's own work and waits on the critical path, by part: stop, capture, publish, reload, ..."""
    served_version: int | None = None
    """The oldest version that an engine serves."""
    spot_failures: int | None = None
    """Times that the spot trainer failed in this step."""
    spot_off: bool | None = None
    """Whether the drafter is not trained any more; None: the settings turn training off."""
    buffer: BufferStats | None = None
    """What the spot trainer's buffer held; None: nothing yet."""
    saved_s: float | None = None
    """Estimated seconds by which the rollout ended earlier than without drafts (`speculation.off`)."""
    speculation_disabled: bool | None = None
    """Whether drafting is switched off because it made rollouts slower; None: no statistics."""
    errors: Mapping[str, int] | None = None
    """Failures of TLT since the run began that did not end it, by what failed."""


Metrics = dict[str, float | None]
"""None: not measured."""


def step_metrics(observations: StepObservations) -> dict[str, float]:
    """The `tlt/*` metrics of one RL step; all are finite."""
    metrics: Metrics = {
        **_speculation_metrics(list(observations.replicas.values())),
        **_idle_metrics(observations),
        **_spot_metrics(observations),
        **_drafter_metrics(observations),
        "tlt/saved_estimate_s": observations.saved_s,
        "tlt/speculation_disabled": observations.speculation_disabled,
    }
    if (errors := observations.errors) is not None:
        metrics["tlt/errors"] = sum(errors.values())
        metrics |= {f"tlt/errors_{_key(what)}": count for what, count in errors.items()}
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _speculation_metrics(replicas: Sequence[EngineStats]) -> Metrics:
    """Acceptance and draft lengths, from counters summed over all engines.

    The accept length is tokens per verified draft, with the token that the target adds.
    """
    if not any(r.num_steps for r in replicas):
        return {}
    drafts = sum(r.num_drafts for r in replicas)
    accepted = _by_position(r.num_accepted_tokens_per_pos for r in replicas)
    metrics: Metrics = {"tlt/accept_length": accept_length(sum(accepted), drafts) if drafts else None}
    for i, offered in enumerate(_by_position(r.num_draft_tokens_per_pos for r in replicas)):
        if offered:
            metrics[f"tlt/accept_rate_pos_{i + 1}"] = accepted[i] / offered
    lengths = Counter[int]()
    for r in replicas:
        lengths.update(r.steps_by_draft_length)
    if total := lengths.total():
        for k in range(max(0, *lengths) + 1):
            metrics[f"tlt/draft_length_frac_{k}"] = lengths[k] / total
        metrics["tlt/drafter_off_frac"] = sum(n for k, n in lengths.items() if k < 0) / total
        metrics["tlt/draft_length_mean"] = sum(max(k, 0) * n for k, n in lengths.items()) / total
    return metrics


def _by_position(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _idle_metrics(observations: StepObservations) -> Metrics:
    metrics: Metrics = {"tlt/trained_s": observations.trained_s}
    if observations.idle_s:
        metrics["tlt/idle_s"] = sum(observations.idle_s.values())
    overhead = dict(observations.overhead)
    if control_s := max((r.control_s for r in observations.replicas.values()), default=0.0):
        overhead["control"] = control_s
    if overhead:
        metrics["tlt/overhead_s"] = sum(overhead.values())
        metrics |= {f"tlt/overhead_{_key(part)}_s": seconds for part, seconds in overhead.items()}
    return metrics


def _key(words: str) -> str:
    return re.sub("[ -]", "_", words)


def _spot_metrics(observations: StepObservations) -> Metrics:
    metrics: Metrics = {
        "tlt/spot_failures": observations.spot_failures,
        "tlt/spot_off": observations.spot_off,
    }
    trained = [s for s in observations.sessions if s.steps > 0 and s.outcome != "failed"]
    if observations.sessions:
        metrics["tlt/skipped_steps"] = sum(s.skipped for s in observations.sessions)
    losses = [(s.loss, s.tokens) for s in trained if math.isfinite(s.loss)]
    if weight := sum(tokens for _, tokens in losses):
        metrics["tlt/drafter_loss"] = sum(loss * tokens for loss, tokens in losses) / weight
    if (buffer := observations.buffer) is not None and buffer.responses:
        metrics["tlt/draft_vocab_coverage"] = buffer.draftable / buffer.responses
    return metrics


def _drafter_metrics(observations: StepObservations) -> Metrics:
    metrics: Metrics = {
        "tlt/drafter_version": observations.served_version,
    }
    if (publish := observations.publish) is not None:
        metrics["tlt/held_out_accept_length_candidate"] = publish.tau.get("candidate")
        metrics["tlt/held_out_accept_length_served"] = publish.tau.get("served")
    if observations.reloads:
        metrics["tlt/reload_failures"] = sum(not r.ok for r in observations.reloads)
    return metrics


def counted_savings(metrics: Mapping[str, float]) -> float | None:
    """Savings of a rollout; None if they are unknown, or if nothing was drafted and the drafter lost no time."""
    saved_s = metrics.get("tlt/saved_estimate_s")
    if saved_s is None:
        return None
    drafted = metrics.get("tlt/draft_length_mean", 0.0) > 0
    return saved_s if drafted or saved_s < 0 else None


def step_line(metrics: Mapping[str, float], step: int, total: int | None = None) -> str:
    """Summarise a step's metrics (verl's and `tlt/*`): "step  3/10 | reward 0.50 | ..."; unmeasured: left out."""
    width = len(str(total or step))
    idle = _part(metrics, "tlt/idle_s", "idle {:.1f} s")
    saved_s = counted_savings(metrics)
    if idle:
        idle += _part(metrics, "tlt/trained_s", ", of which {:.1f} s trained the drafter")
    saved = ""
    if saved_s is not None:
        verb = "saved" if saved_s >= 0 else "lost"
        saved = f"{verb} {abs(saved_s):.1f} s"
    parts = [
        f"step {step:>{width}}" + (f"/{total}" if total else ""),
        _part(metrics, "critic/score/mean", "reward {:.2f}"),
        _part(metrics, "timing_s/gen", "rollout {:.1f} s"),
        _part(metrics, "tlt/accept_length", "accept {:.2f}"),
        _draft_lengths(metrics),
        idle,
        _part(metrics, "tlt/drafter_version", "drafter v{:.0f}"),
        saved,
    ]
    return " | ".join(part for part in parts if part)


def _part(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name)
    return "" if value is None else form.format(value)


def _draft_lengths(metrics: Mapping[str, float]) -> str:
    """Mean K of the engine steps that drafted, and the share of those that did not."""
    mean = metrics.get("tlt/draft_length_mean")
    off = metrics.get("tlt/drafter_off_frac")
    if mean is None or off is None:
        return ""
    without_drafts = off + metrics["tlt/draft_length_frac_0"]
    if without_drafts > 0.995:  # "100%" as it is printed
        return "no drafts"
    text = f"K {mean / (1.0 - without_drafts):.1f}"
    return f"{text} ({without_drafts:.0%} without)" if without_drafts >= 0.005 else text
