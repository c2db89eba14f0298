"""Tables about the drafter: what training it brings and costs."""

from itertools import accumulate
from operator import mul
from typing import Any

from tables.page import load, percent, rows


def study() -> str:
    """The study: frozen, trained online, and trained offline for as long, by initial drafter."""

    def gain(of: dict[str, Any], key: str) -> str:
        found = of[key]
        digits = 1 if abs(found["mean"]) < 0.1 else 0
        low, high = percent(found["low"], digits), percent(found["high"], digits)
        return f"{percent(found['mean'], digits)} % ({low} to {high} %)"

    compared = (
        "online_vs_frozen_accept_length_late",
        "online_vs_extra_accept_length_late",
        "online_vs_none_speed_late",
        "frozen_vs_none_speed_late",
    )
    body = [
        [
            name.replace("_", "-"),
            " / ".join(f"{of[f'{arm}_late']:.2f}" for arm in ("frozen", "extra", "online")),
            *(gain(of, key) for key in compared),
        ]
        for name, of in load("drafter_study")["summary"].items()
    ]
    return rows(
        ("Start", "accept length late in the run: frozen / extra / online", "online against frozen",
         "online against extra", "tokens a second, online against no drafter", "frozen against no drafter"), body,
    )  # fmt: skip


def learning() -> str:
    """Accept length and speed of learning by recipe, on two policies' text."""
    corpora = load("drafter_learning")["corpora"]

    def cells(of: dict[str, Any] | None) -> list[str]:
        if of is None:
            return ["", "", ""]
        half, end = of["accept_length"][len(of["accept_length"]) // 2 - 1], of["accept_length"][-1]
        mean, *interval = of["faster"]
        times = f"{mean:.2f}" + (" ({:.2f} to {:.2f})".format(*interval) if len(set(interval)) > 1 else "")
        return [str(of["seeds"]), f"{half:.2f} / {end:.2f}", times]

    names = list(dict.fromkeys(name for of in corpora.values() for name in of))
    body = [[f"`{name}`", *cells(corpora["toy"].get(name)), *cells(corpora["prose"].get(name))] for name in names]
    head = ("seeds", "accept length half-way / at the end", "times as fast as `base`")
    return rows(("Recipe", f"toy: {head[0]}", *head[1:], f"prose: {head[0]}", *head[1:]), body)


def real_head() -> str:
    """How far the head of a language model got, check by check of its warm-ups, and what its engine counts."""
    body, before = [], {"tokens": 0, "seconds": 0.0}
    for call in load("real_policy")["head"]:
        checks = [check for check in call["checks"] if check["tokens"]]
        rest = min(5, len(checks) - 1)  # beside the first
        chosen = {0} | {round(i * (len(checks) - 1) / rest) for i in range(1, rest + 1)}
        for check in (checks[i] for i in sorted(chosen)):
            tokens, minutes = before["tokens"] + check["tokens"], (before["seconds"] + check["seconds"]) / 60
            body.append([f"{call['responses']}", f"{tokens:,}", f"{minutes:.0f}", f"{check['tau']:.2f}", "", ""])
        first = list(accumulate(call["acceptance"], mul))
        body[-1][3:] = [f"{1 + sum(first[:k]):.2f}" for k in (5, 3)] + [f"{call['accept_length_served']:.2f}"]
        before = {key: before[key] + call["checks"][-1][key] for key in before}
    head = ("responses", "tokens trained on", "minutes", "accept length at K=5", "at K=3", "served by stock vLLM, K=5")
    return rows(head, body)


def merging() -> str:
    """Merged drafters against drafters of one worker, three seeds each."""
    keys = ("merged_vs_better_alone", "merged_vs_one_with_all_tokens", "merged_unequal_vs_better_alone")
    body = []
    for length in load("drafter_merging")["lengths"]:
        for number in range(len(length["seeds"][0]["sessions"])):
            sessions = [seed["sessions"][number] for seed in length["seeds"]]
            cells = [f"{', '.join(percent(s[key]['mean'], 1) for s in sessions)} %" for key in keys]
            if all(not any(s[keys[2]].values()) for s in sessions):
                cells[2] = "0 (left out)"
            body.append([f"{length['micro_batches']}, {number + 1}", *cells])
    return rows(
        ("Micro-batches, session", "merged against the better one alone", "merged against one worker with all tokens",
         "unequal: against the longer one alone"), body,
    )  # fmt: skip
