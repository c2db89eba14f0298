"""One line per RL step for people: what TLT did in it and what that was worth."""

from __future__ import annotations

from collections.abc import Mapping


def step_line(metrics: Mapping[str, float], step: int, total: int | None = None) -> str:
    """Summarise a step's metrics (verl's and `tlt/*`); a part that was not measured is left out.

    >>> step_line({"critic/score/mean": 0.5, "timing_s/gen": 12.0, "tlt/accept_length": 2.25}, 3, 10)
    'step  3/10 | reward 0.50 | rollout 12.0 s | accept 2.25'
    """
    width = len(str(total or step))
    parts = [
        f"step {step:>{width}}" + (f"/{total}" if total else ""),
        _part(metrics, "critic/score/mean", "reward {:.2f}"),
        _part(metrics, "timing_s/gen", "rollout {:.1f} s"),
        _part(metrics, "tlt/accept_length", "accept {:.2f}"),
        _draft_lengths(metrics),
        _bubble(metrics),
        _part(metrics, "tlt/drafter_version", "drafter v{:.0f}"),
        _saved(metrics),
    ]
    return " | ".join(part for part in parts if part)


def _part(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name)
    return "" if value is None else form.format(value)


def _draft_lengths(metrics: Mapping[str, float]) -> str:
    """K used: the mean over the engine steps that drafted, and the share of those that did not."""
    off, mean = metrics.get("tlt/spec_off_frac"), metrics.get("tlt/draft_length_mean")
    if off is None or mean is None:
        return ""
    if off > 0.995:
        return "K off"
    text = f"K {mean / (1.0 - off):.1f}"
    return f"{text} (off {off:.0%})" if off >= 0.005 else text


def _bubble(metrics: Mapping[str, float]) -> str:
    bubble = metrics.get("tlt/bubble_s")
    if bubble is None:
        return ""
    trained = metrics.get("tlt/bubble_trained_s")
    return f"bubble {bubble:.1f} s" + (f" ({trained:.1f} trained)" if trained is not None else "")


def _saved(metrics: Mapping[str, float]) -> str:
    saved = metrics.get("tlt/saved_s")
    if saved is None:
        return ""
    return f"saved {saved:.1f} s" if saved >= 0 else f"lost {-saved:.1f} s"
