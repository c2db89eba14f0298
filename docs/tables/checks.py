"""Tables about killed runs and judged samples."""

from __future__ import annotations

from tables.page import load, rows


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
    return rows(("killed", "resumed", "all of one step"), [*body, ["**together**", len(every), f"**{sum(every)}**"]])


KILLED = {
    "start": "while it resumed", "rollout": "in a rollout", "session": "while a replica trained",
    "merge": "in a merge", "update": "in an update", "save": "while it saved", "publish": "while it published",
    "sync": "in a weight sync",
}  # fmt: skip


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
