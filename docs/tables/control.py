"""Tables about the choice of K: what choosing costs, and how well it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import mean, median
from typing import Any

from tables.page import load, percent, recorded, rows


def off() -> str:
    """A step of an engine that is OFF, and of a second stock engine, over stock's."""
    body = [
        [batch, f"{of['stock_ms']:.1f} ms", *(_over(of["over_stock"][engine]) for engine in ("stock again", "off"))]
        for batch, of in load("off")["batches"].items()
    ]
    return rows(("batch", "stock's step", "a second stock engine", "OFF"), body)


def _over(ratio: Sequence[float]) -> str:
    of_all, low, high = (percent(end - 1) for end in ratio)
    return f"{of_all} % ({low} to {high})"


def control_by_batch() -> str:
    """K=0 against an engine without a drafter, and against vLLM's own; with intervals."""
    intervals = {"k0_over_stock": "k0", "k0_over_vllm_k0": "k0_over_vllm"}
    body = []
    for batch, of in load("control")["cost_vs_stock_by_batch"].items():
        cells = [_over((of[ratio], *of[f"{name}_interval"])) for ratio, name in intervals.items()]
        body.append([batch, *cells])
    return rows(("batch", "K=0", "K=0 over vLLM's own"), body)


def oracles() -> str:
    """Every policy's worst and median replay; nothing where none were recorded."""
    if not recorded("live_table"):
        return ""
    found = load("live_table")
    replays, detail = found["replay"], found["replay_detail"]

    def scores(name: str) -> list[float]:
        return [r["policies"][name]["pct_of_oracle"] for r in replays]

    def row(name: str, values: Sequence[float]) -> list[str]:
        return [name, f"{min(values):.1f}", f"{median(values):.1f}"]

    others = [seed["pct_of_oracle"] for of in detail.values() for seed in of["other_seeds"]]
    body = [
        row("`live_table`, five seeds of each replay", [*scores("live_table"), *others]),
        row("best K per range of batch sizes, in hindsight (O2)", [of["O2_pct"] for of in detail.values()]),
        row(
            "best single K, in hindsight (O1)",
            [r["policies"][detail[r["name"]]["O1"]]["pct_of_oracle"] for r in replays],
        ),
        row("`ema`", scores("ema")),
        row("`bandit`", scores("bandit")),
    ]
    on = found["machine"]["date"][:10]
    return (
        f"* **Figures**: [live_table.json](live_table.json), {on}, simulated\n\n{rows(('', 'worst', 'median'), body)}"
    )


def race() -> str:
    """A chosen K against each fixed K and none, load by load: predicted and measured, with the verdict."""
    if not recorded("race"):
        return ""
    found, body = load("race"), []
    for text, of in found["loads"].items():
        over, predicted = of["over"]["adjusted"], of["predicted"]
        seconds = {arm: mean(turn[arm]["seconds"] for turn in of["rounds"]) for arm in over}
        body += [
            [f"`{text}`: predicted", *(f"{predicted[arm] / predicted['live_table']:.2f}x" for arm in over)],
            ["measured", *("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in over.values())],
            ["seconds of a drain", *(f"{of_arm:.1f}" for of_arm in seconds.values())],
        ]
    shown = [ARMS.get(arm) or arm.replace("vllm-k", "K=") for arm in over]
    verdicts = "".join(f"* `{text}`: {of['verdict']}\n" for text, of in found["loads"].items())
    return f"{_raced(found)}\n{rows(('`live_table` over', *shown), body)}\n{verdicts}\n"


def _raced(found: Mapping[str, Any]) -> str:
    """On what was raced, and what a verified draft costs there at the two ends of a drain."""
    policy, on, costs = found["policy"], found["machine"], found["near"]
    tau = 1.0 + sum(accumulate(found["acceptance"][:5], mul))
    largest = max(costs["-1"], key=int)
    knee = [f"{costs['3'][batch] / costs['-1'][batch]:.1f}x at a batch of {batch}" for batch in ("1", largest)]
    size = (
        f"{policy['parameters'] / 1e6:.0f}M parameters, {policy['layers']} layers and {policy['vocabulary']:,} tokens"
    )
    return (
        f"* **Figures**: [race.json](race.json), {on['date'][:10]}, {on['cpu']}, {found['dtype']}\n\n"
        f"A policy of {size}. A step at K=3 takes {' and '.join(knee)} as long as one without drafts. The accept "
        f"length of the head at K=5 is {tau:.2f} on held-out prompts. An arm's seconds over those of `live_table`:\n"
    )


ARMS = {"off": "no drafts", "table": "vLLM's table, told the same calibration"}
