"""Tables about the simulator, the control plane, the tap and the tests."""

from __future__ import annotations

from tables.page import load, rows


def residuals() -> str:
    """Predictions of the simulator over measurements."""
    found = load("simulator")
    steps, tokens, drained = found["steps"]["ratio"].values(), found["same_tokens"], found["drain"]["tok_per_s"]
    fixed = [of["ratio"] for name, of in drained.items() if name.startswith("fixed")]
    body = [
        [f"segments, against an engine that is stepped through token by token: {len(steps)} cases", "nothing",
         f"{min(steps):.2f} to {max(steps):.2f}"],
    ]  # fmt: skip
    for name, (what, fitted) in ROLLOUTS.items():
        of = tokens[name]
        body.append([what, fitted, f"{of['ratio']:.2f} ({of['lowest']:.2f} to {of['highest']:.2f})"])
    body.append(
        ["[the drain](draft-length.md#draft-length-on-a-real-engine): K=1 to 7 and goodput, told the held-out"
         " acceptance",
         "its arm without drafts, for the machine's pace",
         f"{min(fixed):.2f} to {max(fixed):.2f}; goodput {drained['goodput']['ratio']:.2f}"]
    )  # fmt: skip
    return rows(("Compared", "Fitted to", "Predicted / measured"), body)


ROLLOUTS = {
    "stock": (
        "seven stock rollouts [on the same tokens](runs.md#on-the-same-tokens)",
        "these: a step beside a busy engine, one beside an idle one, a request",
    ),
    "stock, second pair": ("the seven of the second pair", "nothing else"),
    "warm": ("the seven with the trained drafter, told their accept length", "nothing else"),
    "fresh": ("the seven from scratch, likewise", "nothing else"),
}


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
