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
    """Every policy's worst and median replay."""
    found = load("control")
    replays, detail = found["replay"], found["replay_detail"]
    steady = [r for r in replays if detail[r["name"]]["stationary"]]

    def scores(name: str, of: Sequence[dict[str, Any]] = replays) -> list[float]:
        return [r["policies"][name]["pct_of_oracle"] for r in of]

    def seeds(of: Sequence[dict[str, Any]]) -> list[float]:
        others = [s["pct_of_oracle"] for r in of for s in detail[r["name"]]["goodput_other_seeds"]]
        return [*scores("goodput", of), *others]

    def row(name: str, values: Sequence[float], calm: Sequence[float] = ()) -> list[str]:
        stationary = f" (stationary costs: {min(calm):.2f})" if calm else ""
        return [name, f"{min(values):.1f}{stationary}", f"{median(values):.1f}"]

    best_single = [r["policies"][detail[r["name"]]["O1"]]["pct_of_oracle"] for r in replays]
    body = [
        row("`goodput`", scores("goodput"), scores("goodput", steady)),
        row(f"`goodput`, {len(seeds(replays)) // len(replays)} seeds of each replay", seeds(replays), seeds(steady)),
        row("`goodput`, told nothing at its start", [detail[r["name"]]["cold_pct"] for r in replays]),
        row("best K per range of batch sizes, in hindsight (O2)", [detail[r["name"]]["O2_pct"] for r in replays]),
        row("best single K, in hindsight (O1)", best_single),
        row("`ema`", scores("ema")),
        row("`bandit`", scores("bandit" if "bandit" in replays[0]["policies"] else "beg")),
        row("`table`, told the true costs and the first acceptance", scores("table")),
    ]
    return rows(("", "worst", "median"), body)


def foreign() -> str:
    """Goodput and other policies on step costs that follow no formula."""
    found, body = load("control")["foreign"], []
    kinds = {"distorted": "rooflines, distorted", "tiles": "rooflines, in tiles", "CPU": "recorded on CPUs, distorted"}
    for kind in ("calm", "rough"):
        for word, name in kinds.items():
            rows_of = [r["pct_of_oracle"] for r in found if r["kind"] == kind and word in r["name"]
                       and ("CPU" in r["name"]) == (word == "CPU")]  # fmt: skip
            cells = [f"{min(r[who] for r in rows_of):.1f}, {median(r[who] for r in rows_of):.1f}"
                     for who in ("goodput", "table", "best K per octave", "best K")]  # fmt: skip
            body.append([f"{name}: {kind}", len(rows_of), *cells])
    head = (
        "",
        "replays",
        "`goodput`",
        "`table`, told the true costs",
        "best K per range of batches (O2)",
        "best K (O1)",
    )
    return rows(head, body)


def drain() -> str:
    """Tokens per second of a real engine by policy."""
    detail = load("control")["drain_detail"]

    def pooled(found: list[float] | None) -> str:
        return "{:.2f}x ({:.2f} to {:.2f})".format(*found) if found else ""

    body = []
    for name, speeds in detail["tok_per_s_by_run"].items():
        others = name != "goodput"
        worth = detail["worth_pct"].get(name)
        body.append([
            DRAIN.get(name) or name.replace("fixed-", "fixed K="),
            f"{min(speeds):.0f} to {max(speeds):.0f}",
            pooled(detail["over_off"][name] if name != "off" else None),
            pooled(detail["goodput_over"][name] if others else None),
            f"{worth:.1f}" if worth else "",
        ])  # fmt: skip
    return rows(
        ("chosen by", "tokens a second", "over off", "goodput over it", "K, in % of the best at every step"), body,
    )  # fmt: skip


def fixed() -> str:
    """Goodput against vLLM's own fixed K and a table, drain by drain on one engine, in two loads."""
    loads = list(load("control")["fixed"]["loads"].values())
    body = [
        [f"{of['requests']} requests, {len(of['seconds']['goodput'])} drains of each",
         *("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in of["goodput_over"].values())]
        for of in loads
    ]  # fmt: skip
    names = [DRAIN.get(name) or name.replace("vllm-k", "K=") for name in loads[0]["goodput_over"]]
    return rows(("goodput over", *names), body)


def race() -> str:
    """Adaptive draft lengths against each fixed K and none, load by load: predicted and measured, with the verdict."""
    if not recorded("race"):
        return ""
    found, body = load("race"), []
    for text, of in found["loads"].items():
        predicted, rounds = of["predicted"], [turn["seconds"] for turn in of["rounds"]]
        body += [
            [f"`{text}`: predicted", *(f"{predicted[arm] / predicted['goodput']:.2f}x" for arm in of["over"])],
            ["measured", *("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in of["over"].values())],
            ["seconds of a drain", *(f"{mean(turn[arm] for turn in rounds):.1f}" for arm in of["over"])],
        ]
    shown = [DRAIN.get(arm) or arm.replace("vllm-k", "K=").replace("off", "no drafts") for arm in of["over"]]
    verdicts = "".join(f"* `{text}`: {of['verdict']}\n" for text, of in found["loads"].items())
    return f"{_raced(found)}\n{rows(('goodput over', *shown), body)}\n{verdicts}\n"


def _raced(found: Mapping[str, Any]) -> str:
    """On what was raced, and what a verified draft costs there at the two ends of a drain."""
    policy, on, costs = found["policy"], found["machine"], found["costs"]
    tau = 1.0 + sum(accumulate(found["acceptance"][:5], mul))
    largest = max(costs["-1"], key=int)
    knee = [f"{costs['3'][batch] / costs['-1'][batch]:.1f}x at a batch of {batch}" for batch in ("1", largest)]
    size = (
        f"{policy['parameters'] / 1e6:.0f}M parameters, {policy['layers']} layers and {policy['vocabulary']:,} tokens"
    )
    return (
        f"* **Figures**: [race.json](race.json), {on['date'][:10]}, {on['cpu']}, {found['dtype']}\n\n"
        f"A policy of {size}. A step at K=3 takes {' and '.join(knee)} as long as one without drafts. The accept "
        f"length of the head at K=5 is {tau:.2f} on held-out prompts. An arm's seconds over those of `goodput`:\n"
    )


def changing() -> str:
    """How much faster goodput is than a fixed choice while load, costs and acceptance change."""
    faster = load("control")["changing"]["goodput_is_faster_than"]
    body = [
        [DRAIN.get(name) or name.replace("fixed-", "fixed K="),
         *(f"{ratio:.2f}x ({low:.2f} to {high:.2f})" for ratio, low, high in stages.values())]
        for name, stages in faster.items()
    ]  # fmt: skip
    heads = ["the whole run" if stage == "all" else stage for stage in next(iter(faster.values()))]
    return rows(("goodput against", *heads), body)


DRAIN = {"beg": "`bandit`", "bandit": "`bandit`", "ema": "`ema`", "goodput": "`goodput`",
         "table": "vLLM's table, told goodput's calibration"}  # fmt: skip
