"""Tables about the parts: the choice of K, the drafter, sampling, and jobs that were killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import mean, median
from typing import Any

from tables.page import load, recorded, rows, source, two_places

KILLED = {
    "start": "while it resumed", "rollout": "in a rollout", "session": "while a replica trained",
    "judged": "while it waited for a verdict", "update": "in an update",
    "save": "while it saved", "publish": "while it published", "sync": "in a weight sync",
}  # fmt: skip
"""Phases of `benchmarks.resume`."""


def oracles(file: str) -> str:
    """Worst and median replay of `live_table` and of the best single K."""
    found = load(file)
    replays, detail = found["replay"], found["replay_detail"]

    def row(name: str, values: Sequence[float]) -> list[str]:
        return [name, f"{min(values):.1f}", f"{median(values):.1f}"]

    first = [r["policies"]["live_table"]["pct_of_oracle"] for r in replays]
    others = [seed["pct_of_oracle"] for of in detail.values() for seed in of["other_seeds"]]
    single = [r["policies"][detail[r["name"]]["best_single"]]["pct_of_oracle"] for r in replays]
    body = [
        row("`live_table`, five seeds of each replay", first + others),
        row("best single K, in hindsight", single),
    ]
    return source(file) + rows(("", "worst", "median"), body)


def race(file: str) -> str:
    """A chosen K against each fixed K and none, load by load: predicted and measured, with the verdict.

    Nothing where no race was recorded.
    """
    if not recorded(file):
        return ""
    found, body = load(file), []
    for text, of in found["loads"].items():
        over, predicted = of["over"]["adjusted"], of["predicted"]
        seconds = {arm: mean(turn[arm]["seconds"] for turn in of["rounds"]) for arm in over}
        body += [
            [f"`{text}`: predicted", *(f"{predicted[arm] / predicted['live_table']:.2f}x" for arm in over)],
            ["measured", *("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in over.values())],
            ["seconds of a drain", *(f"{of_arm:.1f}" for of_arm in seconds.values())],
        ]
    named = {"off": "no drafts", "table": "vLLM's table, told the same calibration"}
    shown = [named.get(arm) or arm.replace("vllm-k", "K=") for arm in over]
    verdicts = "".join(f"* `{text}`: {of['verdict']}\n" for text, of in found["loads"].items())
    return f"{source(file)}{_raced(found)}\n{rows(('`live_table` over', *shown), body)}\n{verdicts}\n"


def _raced(found: Mapping[str, Any]) -> str:
    """On what was raced, and what a verified draft costs there at the two ends of a drain."""
    policy, costs = found["policy"], found["near"]
    size = (
        f"{policy['parameters'] / 1e6:.0f}M parameters, {policy['layers']} layers and {policy['vocabulary']:,} tokens"
    )
    largest = max(costs["-1"], key=int)
    knee = [f"{costs['3'][batch] / costs['-1'][batch]:.1f}x at a batch of {batch}" for batch in ("1", largest)]
    tau = 1.0 + sum(accumulate(found["acceptance"][:5], mul))
    return (
        f"A policy of {size}, in {found['dtype']}. A step at K=3 takes {' and '.join(knee)} as long as one without "
        f"drafts. The accept length of the head at K=5 is {tau:.2f} on held-out prompts. An arm's seconds over those "
        "of `live_table`:\n"
    )


def along(file: str) -> str:
    """What stock vLLM accepts with the policy before and after a run, of the head at its start and after it."""
    found, when = load(file), ("before the run", "after the run")

    def cell(policy: str, head: str) -> str:
        one = found["served"][f"policy {policy}, head {head}"]
        return f"{one['accept_length']:.2f} ± {one['two_errors']:.2f}"

    body = [[f"head {head}", *(cell(policy, head) for policy in when)] for head in when]
    table = rows(("accept length at K=5", *(f"policy {policy}" for policy in when)), body)
    trained = f"In {len(found['steps']) + 1} steps idle time trained the head on {found['tokens_trained']:,} tokens.\n"
    return f"{source(file)}{table}\n{trained}{_in_the_run(found)}"


def _in_the_run(found: Mapping[str, Any]) -> str:
    """Accept length and reward of the run's steps, means of four."""
    steps = found["steps"]
    parts = [steps[begin : begin + 4] for begin in range(0, len(steps), 4)]
    head = ("in the run", *(f"steps {part[0]['step']} to {part[-1]['step']}" for part in parts))

    def average(part: list[dict[str, Any]], name: str) -> float | None:
        values = [step[name] for step in part if step[name] is not None]
        return mean(values) if values else None

    shown = (("accept length", "accept_length"), ("reward", "reward"))
    return "\n" + rows(head, [[what, *(two_places(average(part, name)) for part in parts)] for what, name in shown])


def lossless() -> str:
    """Stock vLLM and verl-tlt, judged by Hugging Face."""
    shown = {
        "engine": "", "setting": "", "tokens": "", "accepted": ".2f", "p_places": ".2g", "p_martingale": ".2g",
        "power": ".2f", "logprob_error": ".0e",
    }  # fmt: skip
    names = {"p_places": "p, places", "p_martingale": "p, martingale", "logprob_error": "log-prob error"}
    found = [row for name in ("lossless", "lossless_tlt") for row in load(name)["rows"]]
    body = [
        [*(format(row[key], style) for key, style in shown.items()), f"{row['wrong_ends']} of {row['responses']}"]
        for row in found
    ]
    return rows((*(names.get(key, key) for key in shown), "wrong ends"), body)


def resumptions() -> str:
    """Whether killed jobs resumed with parts of one and the same step, by where they were killed."""
    found: dict[str, list[bool]] = {}
    kills: list[str] = []
    for link in load("resume")["links"]:
        if "equal" in link:
            found.setdefault(", then ".join(kills), []).append(link["equal"])
            kills = []
        kills.append(KILLED.get(link["killed_in"], ""))
    body = [[killed, len(equal), sum(equal)] for killed, equal in found.items()]
    every = [one for equal in found.values() for one in equal]
    total = ["**together**", len(every), f"**{sum(every)}**"]
    return rows(("killed", "resumed", "all of the same step"), [*body, total])
