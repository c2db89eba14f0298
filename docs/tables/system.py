"""Tables about the control plane, the tap and the tests."""

from __future__ import annotations

from tables.page import load, rows


def mutation() -> str:
    """How many small faults the tests of a package notice."""
    named = {"speculation": "control of the draft length", "idle": "idle time"}
    body = []
    for package, of in load("mutation")["packages"].items():
        low, high = (f"{100 * share:.0f}" for share in of["interval_95"])
        score = f"**{100 * of['score']:.1f} %** ({low} to {high} %)"
        body.append(
            [f"`{package}/`: {named[package]}", of["mutants"], of["sample"], of["killed"], len(of["equivalent"]), score]
        )
    return rows(("", "mutants", "drawn", "noticed", "change nothing", "score"), body)


def lossless() -> str:
    """Stock vLLM and verl-tlt, judged by Hugging Face."""
    body = [
        [
            row["engine"],
            row["setting"],
            row["tokens"],
            f"{row['accepted']:.2f}",
            f"{row['p_places']:.2g}",
            f"{row['p_martingale']:.2g}",
            f"{row['power']:.2f}",
            f"{row['logprob_error']:.0e}",
            f"{row['wrong_ends']} of {row['responses']}",
        ]
        for name in ("lossless", "lossless_tlt")
        for row in load(name)["rows"]
    ]
    head = (
        "engine",
        "setting",
        "tokens",
        "accepted",
        "p, places",
        "p, martingale",
        "power",
        "log-prob error",
        "wrong ends",
    )
    return rows(head, body)
