"""Tables about the drafter: what training it brings and costs."""

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
