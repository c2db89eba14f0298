"""Tables about the drafter: what training it brings and costs."""

from __future__ import annotations

import re
from statistics import mean, median
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


def objectives() -> str:
    """Accept length by objective, with the paper's."""
    paper = {"eagle": "6.53, 1x", "hass": "6.67, 3x", "eagle3": "6.83, 7x"}
    body = []
    for name, of in load("drafter_objectives")["objectives"].items():
        taus = [f"{mean(seed['accept_length'][str(k)] for seed in of['seeds']):.2f}" for k in (1, 3, 7)]
        shown = f"`{name}`{' (default)' if name == 'hass' else ''}"
        cost = f"{of['cpu_seconds_per_step']:.2f}"
        body.append([shown, of["passes"], cost, " / ".join(taus), f"{mean(of['at_equal_cost']):.2f}", paper[name]])
    return rows(
        ("Objective", "Draft positions unrolled", "CPU seconds per step", "Accept length at K=1 / 3 / 7",
         "At equal cost (K=7)", "Paper, Table 7: accept length, cost"), body,
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


def averaging() -> str:
    """Accept length of a head's weights and of their average, on the way."""
    body = []
    for corpus, of in load("drafter_averaging")["corpora"].items():
        for head in ("new", "warmed up"):
            for check in of[head]:
                gain, low, high = (f"{percent(value, 1)}" for value in check["longer"])
                longer = f"{gain} % ({low} to {high} %)" if check["steps"] else ""
                lengths = (f"{check[key]:.2f}" for key in ("weights", "average"))
                body.append([f"{corpus}, {of['seeds']} seeds", head, check["steps"], *lengths, longer])
    return rows(("Text", "Head", "optimizer steps", "weights", "average", "average over weights"), body)


def packing() -> str:
    """Speed of packed batches relative to padded ones."""
    found = load("drafter_packing")["ratios"]
    body = []
    best = max(found, key=lambda key: median(found[key]))
    for name, ratios in found.items():
        budget, group = re.findall(r"\d+", name)
        middle = f"{median(ratios):.2f}x"
        shown = f"**{middle}**" if name == best else middle
        body.append([f"{budget} rows", f"{group} sequences", f"{shown} ({min(ratios):.2f} to {max(ratios):.2f})"])
    return rows(("packed batch", "padded group", "samples a second, packed over padded: median (min to max)"), body)


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


def merge_tree() -> str:
    """Seconds that merging takes of one worker."""
    found = load("merge_tree")
    hand_in, join, adopt, whole = (
        found[key] for key in ("hand_in_s", "join_s_per_level", "adopt_s", "critical_path_s")
    )
    body = [
        ["hand in: the change in 16 bits, in eight slices (two threads)", hand_in, 1],
        ["the tree: two levels, on each an average of one slice of eight workers", join, found["levels"]],
        ["adopt: the new version, and weights and average with it (two threads)", adopt, 1],
    ]
    body = [[what, *(f"{f'{n} x ' * (n > 1)}{took[clock]:.2f} s" for clock in took)] for what, took, n in body]
    body.append(["**together**", f"**{whole['clock']:.2f} s**", f"{whole['cpu']:.2f} s"])
    return rows(("", "by the clock", "CPU"), body)
