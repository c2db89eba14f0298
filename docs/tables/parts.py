"""Tables about the parts: the choice of K, the drafter, sampling, and jobs that were killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import mean, median
from typing import Any

from tables.page import load, recorded, rows, source, two_places
from verl_tlt.speculation.types import OFF

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

    Loads with fewer rounds than the rule asks for are left out.
    """
    if not recorded(file):
        return ""
    found = load(file)
    judged = {text: of for text, of in found["loads"].items() if of["rounds"] >= found["fewest_rounds"]}
    if not judged:
        return ""
    body = []
    for text, of in judged.items():
        raced = [race["loads"][text] for race in found["races"] if race["loads"].get(text, {}).get("rounds")]
        over, turns = of["over"]["adjusted"], [turn for each in raced for turn in each["rounds"]]
        predicted = {
            arm: mean(each["predicted"][arm] / each["predicted"]["live_table"] for each in raced) for arm in over
        }
        seconds = {arm: mean(turn[arm]["seconds"] for turn in turns) for arm in over}
        body += [
            [f"`{text}`: predicted", *(f"{predicted[arm]:.2f}x" for arm in over)],
            ["measured", *("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in over.values())],
            ["seconds of a drain", *(f"{of_arm:.1f}" for of_arm in seconds.values())],
        ]
    named = {"off": "no drafts", "table": "vLLM's table, told the same calibration"}
    shown = [named.get(arm) or arm.replace("vllm-k", "K=") for arm in over]
    verdicts = "".join(f"* `{text}`: {of['verdict']}\n" for text, of in judged.items())
    table = rows(("`live_table` over", *shown), body)
    return f"{source(file)}{''.join(map(_raced, found['races']))}\n{table}\n{verdicts}\n"


def _raced(race: Mapping[str, Any]) -> str:
    """On what was raced, and what a verified draft costs there at the two ends of a drain."""
    policy, costs = race["policy"], {(row["draft_length"], row["batch"]): row["seconds"] for row in race["near"]}
    size = (
        f"{policy['parameters'] / 1e6:.0f}M parameters, {policy['layers']} layers and {policy['vocabulary']:,} tokens"
    )
    batches = [batch for length, batch in costs if length == OFF]
    knee = [
        f"{costs[3, batch] / costs[OFF, batch]:.1f}x at a batch of {batch}" for batch in (min(batches), max(batches))
    ]
    tau = 1.0 + sum(accumulate(race["acceptance"][:5], mul))
    return (
        f"* {race['machine']['date'][:10]}, commit {race['machine']['commit'][:8]}: a policy of {size}, in "
        f"{race['dtype']}. A step at K=3 takes {' and '.join(knee)} as long as one without drafts. The accept length "
        f"of the head at K=5 is {tau:.2f} on held-out prompts.\n"
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
