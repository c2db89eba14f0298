"""The line that the trainer prints for every RL step."""

from __future__ import annotations

from collections.abc import Mapping

from verl_tlt.trace.metrics import counted_savings


def step_line(metrics: Mapping[str, float], step: int, total: int | None = None) -> str:
    """Summarise a step's metrics (verl's and `tlt/*`); what was not measured is left out.

    >>> step_line({"critic/score/mean": 0.5, "timing_s/gen": 12.0, "tlt/accept_length": 2.25}, 3, 10)
    'step  3/10 | reward 0.50 | rollout 12.0 s | accept 2.25'
    """
    width = len(str(total or step))
    bubble = _part(metrics, "tlt/bubble_s", "bubble {:.1f} s")
    parts = [
        f"step {step:>{width}}" + (f"/{total}" if total else ""),
        _part(metrics, "critic/score/mean", "reward {:.2f}"),
        _part(metrics, "timing_s/gen", "rollout {:.1f} s"),
        _part(metrics, "tlt/accept_length", "accept {:.2f}"),
        _draft_lengths(metrics),
        bubble + (bubble and _part(metrics, "tlt/bubble_trained_s", " ({:.1f} trained)")),
        _part(metrics, "tlt/drafter_version", "drafter v{:.0f}"),
        _savings(counted_savings(metrics)),
    ]
    return " | ".join(part for part in parts if part)


def _part(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name)
    return "" if value is None else form.format(value)


def _draft_lengths(metrics: Mapping[str, float]) -> str:
    """Mean K of the engine steps that drafted, and the share of those that did not."""
    off, mean = metrics.get("tlt/spec_off_frac"), metrics.get("tlt/draft_length_mean")
    if off is None or mean is None:
        return ""
    if off > 0.995:
        return "no drafts"
    text = f"K {mean / (1.0 - off):.1f}"
    return f"{text} ({off:.0%} without)" if off >= 0.005 else text


def _savings(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"saved {seconds:.1f} s" if seconds >= 0 else f"lost {-seconds:.1f} s"
