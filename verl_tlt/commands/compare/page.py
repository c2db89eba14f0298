"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from verl_tlt.commands.compare.record import Step, Turn
from verl_tlt.commands.compare.result import RATIOS, arm_rows
from verl_tlt.commands.report import figures
from verl_tlt.commands.report.page import PageContent, render_page

COLORS = (figures.INK, figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.RED, figures.SKY)
PER = 1000
"""Tokens that seconds are shown for."""


def write_compare_page(path: Path, found: Mapping[str, Any], turns: Sequence[Turn]) -> Path:
    """Write the page of a result (`result.found_of`) and its turns, and return its path."""
    charts = [
        figures.make_chart("Times as fast as stock", "Per token, with 95 % intervals; small dots are single steps.",
                   partial(draw_ratios, found=found), 1.6 + 0.7 * len(found["ratios"]))
    ]  # fmt: skip
    for title, unit, note, lines in [_leads(found), *_lines(turns)]:
        charts.append(figures.make_chart(title, note, partial(figures.draw_lines, unit=unit, lines=lines)))
    content = PageContent("a comparison with stock verl", found["sentences"], charts, _tables(found, turns))
    return render_page(path, content)


def draw_ratios(ax: Axes, found: Mapping[str, Any]) -> None:
    """A row for each arm: rollout and step, with interval and single steps; right of the line is faster than stock."""
    names = list(found["ratios"])
    for color, (offset, (key, what)) in zip((figures.BLUE, figures.ORANGE), enumerate(RATIOS.items()), strict=True):
        for row, name in enumerate(names):
            of, y = found["ratios"][name][key], len(names) - row - 0.3 * offset
            ax.plot(of["each"], [y] * len(of["each"]), ".", color=color, alpha=0.3, markersize=5)
            ax.plot([of["low"], of["high"]], [y, y], color=color, linewidth=2)
            ax.plot(of["pooled"], y, "o", color=color, label=what if row == 0 else None)
            ax.annotate(f"{of['pooled']:.2f}x", (of["pooled"], y), (0, 6), textcoords="offset points", color=color)
    ax.axvline(1, color=figures.INK, linewidth=1, linestyle="--")
    ax.set_yticks([len(names) - row - 0.15 for row in range(len(names))], names)
    ax.set_ylim(0.2, len(names) + 0.5)
    ax.set_xlabel("times as fast as stock, per token")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _leads(found: Mapping[str, Any]) -> tuple[str, str, str, dict[str, tuple[str, figures.Points]]]:
    """Title, unit, note and a line for each arm but stock."""
    note = "Seconds by which an arm has finished a step sooner than stock, had stock written as many tokens."
    place = list(found["arms"]).index
    lines: dict[str, tuple[str, figures.Points]] = {
        name: (COLORS[place(name) % len(COLORS)], dict(of["lead"]["seconds"])) for name, of in found["ratios"].items()
    }
    return "Ahead of stock", "seconds", note, lines


def _lines(turns: Sequence[Turn]) -> list[tuple[str, str, str, dict[str, tuple[str, figures.Points]]]]:
    """Title, unit, note and a line for each arm, over RL steps; a gap where a turn's first step is left out."""
    names = sorted({turn.arm for turn in turns}, key=[turn.arm for turn in turns].index)
    of_arm = {name: [step for turn in turns if turn.arm == name for step in turn.steps] for name in names}
    found = []
    per = f"seconds / {PER} tokens"
    columns: tuple[tuple[str, str, str, Callable[[Step], float | None]], ...] = (
        ("Rollout", per, "Seconds of the rollout, by what was written.", lambda s: PER * s.rollout_s / s.tokens),
        ("Reward", "mean reward", "Mean reward of the step's responses.", lambda s: s.reward),
        ("Accept length", "tokens", "Tokens per verified draft, where it is known by step.", lambda s: s.accept_length),
    )
    for title, unit, note, value in columns:
        lines: dict[str, tuple[str, figures.Points]] = {}
        for place, (name, steps) in enumerate(of_arm.items()):
            points: dict[int, float | None] = {step.step - 1: None for step in steps}
            points |= {step.step: value(step) for step in steps}
            if any(point is not None for point in points.values()):
                lines[name] = (COLORS[place % len(COLORS)], dict(sorted(points.items())))
        if lines:
            found.append((title, unit, note, lines))
    return found


def _tables(found: Mapping[str, Any], turns: Sequence[Turn]) -> list[tuple[str, list[str], list[list[str]]]]:
    arms = [[row[0], found["arms"][row[0]]["label"], *row[1:]] for row in arm_rows(found)]
    jobs = [
        [turn.arm, str(turn.turn + 1), *(f"{value:.1f}" for value in (turn.seconds, turn.start_s, turn.first_s,
                                                                       turn.checkpoint_s))]
        for turn in turns
    ]  # fmt: skip
    steps = [
        [turn.arm, str(step.turn + 1), str(step.step), f"{step.step_s:.1f}", f"{step.rollout_s:.1f}",
         f"{step.tokens:.0f}", f"{step.longest:.0f}", f"{step.reward:.3f}",
         "-" if step.accept_length is None else f"{step.accept_length:.2f}"]
        for turn in turns for step in turn.steps
    ]  # fmt: skip
    return [
        ("Arms", ["arm", "what it is", "rollout, per token", "step, per token", "accept length", "reward"], arms),
        ("Steps", ["arm", "round", "step", "step s", "rollout s", "tokens", "longest", "reward", "accept length"],
         steps),
        ("Jobs", ["arm", "round", "seconds", "start and end s", "first step s", "checkpoint s"], jobs),
    ]  # fmt: skip
