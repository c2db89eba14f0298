"""Tables about the simulator, the control plane, the tap and the tests."""

from __future__ import annotations

from tables.page import load, rows


def clusters() -> str:
    """The paper's clusters, simulated."""
    found = load("simulator")["paper"]
    body = [
        [
            f"{row['model']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}",
            f"{row['paper_step']:.2f}",
            f"{row['theirs']['step']:.2f}",
            f"{row['ours']['step']:.2f}",
            f"{100 * row['rollout_share']:.0f} %",
        ]
        for row in found["clusters"]
    ]
    case = found["case_study"]
    last = ["case study: rollout of 128 requests on one engine, 32B", case["paper"], f"{case['theirs']:.2f}", "", ""]
    return rows(
        ("", "paper", "its rule, simulated", "our control, chains of up to 7", "rollout's share"), [*body, last]
    )


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
        ["[the drain](results-draft-length.md#draft-length-on-a-real-engine): K=1 to 7 and goodput, told the held-out"
         " acceptance",
         "its arm without drafts, for the machine's pace",
         f"{min(fixed):.2f} to {max(fixed):.2f}; goodput {drained['goodput']['ratio']:.2f}"]
    )  # fmt: skip
    return rows(("Compared", "Fitted to", "Predicted / measured"), body)


ROLLOUTS = {
    "stock": (
        "seven stock rollouts [on the same tokens](results-runs.md#on-the-same-tokens)",
        "these: a step beside a busy engine, one beside an idle one, a request",
    ),
    "stock, second pair": ("the seven of the second pair", "nothing else"),
    "warm": ("the seven with the trained drafter, told their accept length", "nothing else"),
    "fresh": ("the seven from scratch, likewise", "nothing else"),
}


def control_plane() -> str:
    """The trainer's own work by number of replicas."""
    found = load("control_plane")
    keys = ("critical_path_ms", "look_ms", "trace_kb_per_step", "memory_peak_kb", "memory_left_kb_per_step")
    body = []
    for row in found["rows"]:
        step, look, trace, peak, left = (row[key] for key in keys)
        times = [f"{value:.{1 if value < 9.95 else 0}f} ms" for value in (step, look)]
        sizes = [f"{trace:.0f} KB", f"{peak / 1000:.1f} MB", f"{left:.0f} KB" if left >= 0.5 else "none"]
        body.append([f"{row['replicas']:,}", *times, *sizes])
    grows = ["grows as replicas to the", *(f"{found['exponents'][key]:.2f}" for key in keys[:4]), ""]
    head = ("Replicas", "the trainer's thread, all hooks", "one look at the fleet", "trace", "memory at its peak",
            "left behind by a step")  # fmt: skip
    return rows(head, [*body, grows])


def tap() -> str:
    """What capturing costs a forward."""
    found = load("tap")
    figures = found["figures"]
    names = {"without a tap": "without a tap", "nothing chosen": "nothing chosen", "a quarter chosen": "{} tokens",
             "everything chosen": "all"}  # fmt: skip
    body = []
    for key, name in names.items():
        of, own = figures[key], ["", ""]
        if key != "without a tap":
            own = [
                f"{of['tap_ms']:.1f} ms" if of["tap_ms"] else "0",
                f"{of['mb_kept']:.1f} MB" if of["mb_kept"] else "0",
            ]
        body.append([name.format(of["tokens_kept"]), f"{of['forward_ms']:.0f} ms", *own])
    return rows((f"of {found['tokens']} tokens", "forward", "the tap's own part", "kept"), body)


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
