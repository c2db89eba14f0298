"""The page of a comparison: which arm was faster, the picture, the table."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes

from verl_tlt.commands.charts import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, Chart, finish
from verl_tlt.commands.compare.plan import STOCK, Arm
from verl_tlt.commands.compare.record import Record, Step
from verl_tlt.commands.compare.result import RATIOS, arm_rows, left_out_rows
from verl_tlt.commands.page import Page, PageTable

HEADINGS = (
    "arm", "rollout, times as fast per token", "step, times as fast per token", "accept length (tokens)", "reward",
    "largest probability difference",
)  # fmt: skip
LEFT_OUT = ("arm", "start and end of a job (s)", "its first step (s)", "checkpoint (s)")


def comparison_page(arms: Sequence[Arm], record: Record, result: Mapping[str, Any]) -> Page:
    """The page of everything that `result` says of the turns in `record`."""
    steps = {name: record.steps(name) for name in result["arms"]}
    sentences = result["sentences"] or ["No arm has steps to compare with those of stock verl yet."]
    charts = []
    if result["ratios"]:
        title = "How many times as fast as stock verl"
        note = (
            "Seconds per token of all steps. Right of 1 is faster. The line is the 95 % interval, from three rounds on."
        )
        charts.append(Chart(title, note, partial(draw_ratios, ratios=result["ratios"]), 1.6 + 0.7 * len(arms)))
    note = "Seconds for 1,000 response tokens, and the mean as a line; the first step of each turn is left out."
    charts.append(Chart("Seconds of every step", note, partial(draw_steps, steps=steps)))
    labels = [[arm.name, arm.label] for arm in arms if arm.name in steps]
    described = PageTable("What the arms are", ("arm", ""), labels)
    others = PageTable("Left out of the ratios", LEFT_OUT, left_out_rows(result))
    return Page(
        heading="Stock verl and verl-tlt in turns",
        answer=sentences[0],
        sentences=sentences[1:],
        charts=charts,
        tables=[PageTable("Arms", HEADINGS, table_rows(result, steps)), described, others],
    )


def table_rows(result: Mapping[str, Any], steps: Mapping[str, Sequence[Step]]) -> list[list[str]]:
    """A row for each arm, stock's first: its ratios, accept length, reward, and probability difference."""
    rows = []
    for row in arm_rows(result):
        known = [step.probs_diff_max for step in steps[row[0]] if step.probs_diff_max is not None]
        rows.append([*row, f"{max(known):.1e}" if known else "-"])
    return rows


def draw_ratios(ax: Axes, ratios: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw an arm in each line: its rollout and its step, with intervals where there are any."""
    names = list(ratios)[::-1]  # from below
    for offset, color, (key, label) in zip((0.12, -0.12), (BLUE, ORANGE), RATIOS.items(), strict=True):
        for y, ratio in enumerate(ratios[name][key] for name in names):
            if ratio["low"] is not None:
                ax.plot([ratio["low"], ratio["high"]], [y + offset] * 2, color=color, linewidth=2)
            ax.plot(ratio["pooled"], y + offset, "o", color=color, label=label if y == 0 else None)
    ax.axvline(1.0, color=GREY, linewidth=1, linestyle="--", label=STOCK)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, len(ratios) - 0.4)
    ax.set_xlabel("times as fast per token")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def draw_steps(ax: Axes, steps: Mapping[str, Sequence[Step]]) -> None:
    """Draw a dot for every step of every arm, and a line for all of an arm's seconds over all of its tokens."""
    colors = cycle((INK, BLUE, ORANGE, GREEN, PURPLE, RED, SKY))
    for color, (name, of_arm) in zip(colors, steps.items(), strict=False):
        seconds = [1000 * step.step_s / step.tokens for step in of_arm]
        ax.plot([step.step for step in of_arm], seconds, ".", color=color, markersize=8, label=name)
        whole = 1000 * sum(step.step_s for step in of_arm) / sum(step.tokens for step in of_arm)
        ax.axhline(whole, color=color, linewidth=1)
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    finish(ax, "seconds for 1,000 tokens")
