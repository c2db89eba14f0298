"""The tables of docs/results.md and README, made from the files in benchmarks/results/ by `python docs/generate.py`.

A table stands in its page between `<!-- table: NAME -->` and `<!-- end -->`, NAME being a function here. What is in
between is replaced, so that no figure in a table can differ from the file that it is of (tests/unit/test_docs.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

PAGE = Path(__file__).parent / "results.md"
README = Path(__file__).parents[1] / "README.md"
FILES = Path(__file__).parents[1] / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def load(name: str) -> Any:
    """What a benchmark kept."""
    return json.loads((FILES / f"{name}.json").read_text())


def rows(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return "|" + "|".join(f" {cell} " if str(cell) else " " for cell in cells) + "|\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, body))


def percent(share: float, digits: int = 0) -> str:
    """A difference, with its sign; none where it is nothing at these digits."""
    return re.sub(r"^[+-](0(\.0+)?)$", r"\1", f"{100 * share:+.{digits}f}")


def same_tokens() -> str:
    """Step by step, both pairs."""
    found = load("same_tokens")

    def of(step: dict[str, float]) -> list[str]:
        return [
            f"{step['stock_rollout_s']:.1f} s",
            f"{step['rollout_s']:.1f} s",
            f"{step['accept_length']:.2f}",
            f"{step['rollout_ratio']:.2f}x",
        ]

    both = zip(found["fresh"]["steps"], found["warm"]["steps"], strict=True)
    body = [[fresh["step"], *of(fresh), *of(warm)] for fresh, warm in both]
    medians = [f"{found[name]['rollout_ratio']['median']:.2f}x" for name in ("fresh", "warm")]
    head = [
        "step",
        *("stock", "from scratch", "accept length", "ratio"),
        *("stock", "trained", "accept length", "ratio"),
    ]
    return rows(head, [*body, ["median", "", "", "", medians[0], "", "", "", medians[1]]])


def control_by_batch() -> str:
    """OFF and K=0 against an engine without a drafter, and K=0 against vLLM's own; with intervals."""
    intervals = {"off_over_stock": "off", "k0_over_stock": "k0", "k0_over_vllm_k0": "k0_over_vllm"}
    body = []
    for batch, of in load("control")["cost_vs_stock_by_batch"].items():
        cells = [
            f"{percent(of[ratio] - 1)} % ({' to '.join(percent(end - 1) for end in of[f'{name}_interval'])})"
            for ratio, name in intervals.items()
        ]
        body.append([batch, *cells])
    return rows(("batch", "OFF", "K=0", "K=0 over vLLM's own"), body)


def clusters() -> str:
    """The paper's, simulated."""
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


def control_plane() -> str:
    """By the number of replicas."""
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


def merging() -> str:
    """Three seeds of each session."""
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
    """One worker's share."""
    found = load("merge_tree")
    hand_in, join, adopt, whole = (
        found[key] for key in ("hand_in_s", "join_s_per_level", "adopt_s", "critical_path_s")
    )
    body = [
        ["hand in: the change in 16 bits, in eight slices (two threads)", hand_in, 1],
        ["the tree: two levels, on each an average of one slice of eight workers", join, found["levels"]],
        ["adopt: the new version, and the live parameters with it (two threads)", adopt, 1],
    ]
    body = [[what, *(f"{f'{n} x ' * (n > 1)}{took[clock]:.2f} s" for clock in took)] for what, took, n in body]
    body.append(["**together**", f"**{whole['clock']:.2f} s**", f"{whole['cpu']:.2f} s"])
    return rows(("", "by the clock", "CPU"), body)


def packing() -> str:
    """Packed over padded."""
    found = load("drafter_packing")["ratios"]
    body = []
    best = max(found, key=lambda key: median(found[key]))
    for name, ratios in found.items():
        budget, group = re.findall(r"\d+", name)
        middle = f"{median(ratios):.2f}x"
        shown = f"**{middle}**" if name == best else middle
        body.append([f"{budget} rows", f"{group} sequences", f"{shown} ({min(ratios):.2f} to {max(ratios):.2f})"])
    return rows(("packed batch", "padded group", "samples a second, packed over padded: median (min to max)"), body)


def study() -> str:
    """Frozen, online and trained offline for as long, by where the drafter starts."""

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
        row("`goodput`, five seeds of each replay", seeds(replays), seeds(steady)),
        row("`goodput`, told nothing at its start", [detail[r["name"]]["cold_pct"] for r in replays]),
        row("best K per range of batch sizes, in hindsight (O2)", [detail[r["name"]]["O2_pct"] for r in replays]),
        row("best single K, in hindsight (O1)", best_single),
        row("`ema`", scores("ema")),
        row("`bandit`", scores("bandit" if "bandit" in replays[0]["policies"] else "beg")),
        row("`table`, told the true costs and the first acceptance", scores("table")),
    ]
    return rows(("", "worst", "median"), body)


def foreign() -> str:
    """Goodput and its rivals on step costs that are no formula."""
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


def savings() -> str:
    """What the account claimed to have saved, and what was saved."""
    found, body = load("e2e_forced"), []
    steps = {
        name: {(turn["turn"], step["step"]): step for turn in found["turns"] if turn["arm"] == name
               for step in turn["steps"]} for name in found["arms"]
    }  # fmt: skip
    for name, of in found["ratios"].items():
        saved, arm = of["saved"], found["arms"][name]
        claims = [f"{saved['claimed_s']:.1f} s", f"{saved['measured_s']:.1f} s"] if saved else ["", ""]
        speeds = [f"{of[k]['pooled']:.2f}x ({of[k]['low']:.2f} to {of[k]['high']:.2f})" for k in ("rollout", "e2e")]
        own, stock = steps[name], [step for key, step in steps["stock"].items() if key in steps[name]]
        outside = [sum(s["step_s"] - s["rollout_s"] for s in some) / len(some) for some in (own.values(), stock)]
        share = sum(s["overhead_s"] for s in own.values()) / sum(s["step_s"] for s in own.values())
        lengths = f"{arm['accept_length']:.2f} / {arm['accept_length_tail']:.2f}"
        beside = [f"{outside[0]:.1f} / {outside[1]:.1f} s", f"{100 * share:.1f} %"]
        body.append([f"`{name}`", lengths, *speeds, *claims, *beside])
    return rows(
        ("", "accept length: all / the longest tenth", "rollout", "step", "`tlt/saved_s` claimed",
         "shorter than stock's by", "outside rollout, a step: TLT / stock", "`tlt/overhead_s` of the step"), body,
    )  # fmt: skip


def objectives() -> str:
    """Accept length by objective, beside the paper's."""
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


def drain() -> str:
    """Who chooses K, on a real engine."""
    found = load("control")
    detail, by_run = found["drain_detail"], found["drain_detail"]["tok_per_s_by_run"]
    ours, body = detail["final"]["goodput"]["tok_per_s_by_run"], []
    for name, speeds in by_run.items():
        over = sorted(a / b for a, b in zip(speeds, by_run["off"], strict=True))
        theirs = detail["final"].get(name, {}).get("tok_per_s_by_run")
        met = sorted(a / b for a, b in zip(ours, theirs, strict=True)) if theirs and name != "goodput" else []
        worth = detail["worth_pct"].get(name)
        body.append(
            [
                DRAIN.get(name) or name.replace("fixed-", "fixed K="),
                f"{min(speeds):.0f}{', ' if len(speeds) == 2 else ' to '}{max(speeds):.0f}",
                "" if name == "off" else f"{over[0]:.2f}x, {over[-1]:.2f}x",
                f"{median(met):.2f}x ({met[0]:.2f} to {met[-1]:.2f})" if met else "",
                f"{worth:.1f}" if worth else "",
            ]
        )
    return rows(
        ("chosen by", "tokens a second", "over off", "in the final, goodput over it: median (range)",
         "K, in % of the best at every step"), body,
    )  # fmt: skip


def changing() -> str:
    """How much faster goodput is than a choice made beforehand, while everything moves."""
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


def residuals() -> str:
    """The simulator against what was measured."""
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
        ["[the drain](#draft-length-on-a-real-engine): K=1 to 7 and goodput, told the held-out acceptance",
         "its arm without drafts, for the machine's pace",
         f"{min(fixed):.2f} to {max(fixed):.2f}; goodput {drained['goodput']['ratio']:.2f}"]
    )  # fmt: skip
    return rows(("Compared", "Fitted to", "Predicted / measured"), body)


ROLLOUTS = {
    "stock": (
        "seven stock rollouts [on the same tokens](#on-the-same-tokens)",
        "these: a step beside a busy engine, one beside an idle one, a request",
    ),
    "stock, second pair": ("the seven of the second pair", "nothing else"),
    "warm": ("the seven with the trained drafter, told their accept length", "nothing else"),
    "fresh": ("the seven from scratch, likewise", "nothing else"),
}


def resumptions() -> str:
    """What jobs that were killed went on with, by what they were killed in."""
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


def growth() -> str:
    """The steepest slope of anything, after hundreds of steps."""
    found = load("endurance_leaks")
    units = {"memory": "MiB", "threads": "", "files": "", "shared_memory": "", "objects": "MiB"}
    names = {
        "memory": "resident memory of a process", "threads": "threads of a process",
        "files": "open files of a process", "shared_memory": "entries of /dev/shm", "objects": "Ray's object store",
    }  # fmt: skip
    body = []
    for what, name in names.items():
        of = {key: row for key, row in found["growth"]["series"].items() if key.split(" of ")[0] == what}
        steepest = max(of, key=lambda key: of[key]["slope"])
        row, unit = of[steepest], units[what] and f" {units[what]}"
        whose = steepest.partition(" of ")[2].rpartition(" ")[0]
        body.append(
            [name, len(of), f"{found['tolerance_per_step'][what]}{unit}", f"{row['slope']:.4f}{unit}", whose,
             f"{row['first']:g} to {row['last']:g}{unit}"]
        )  # fmt: skip
    return rows(("", "looked at", "may grow a step", "steepest", "of", "first to last look"), body)


def stops() -> str:
    """How long sessions took to stop."""
    found = load("endurance")["stops"]
    names = {
        "latency_s": "stop, from the request to the answer",
        "longest_micro_batch_s": "the session's longest micro-batch",
        "beyond_the_longest_micro_batch_s": "the one less the other",
    }
    body = [[name, *(f"{1000 * found[key][q]:.0f} ms" for q in ("p50", "p99", "max"))] for key, name in names.items()]
    return rows((f"of {found['stopped']} sessions", "p50", "p99", "longest"), body)


def overhead() -> str:
    """What TLT takes of a step, by phase."""
    found = load("endurance")["overhead"]
    body = [
        [name.replace("_", " "), f"{1000 * of['median_s']:.0f} ms", f"{100 * of['share']:.2f} %"]
        for name, of in found["phases"].items()
    ]
    whole = ["**together**", f"**{1000 * found['median_s']:.0f} ms**", f"**{100 * found['share']:.2f} %**"]
    return rows((f"of steps of {found['median_step_s']} s", "median", "of all steps' time"), [*body, whole])


def end_to_end() -> str:
    """All arms against stock."""
    found = load("e2e")

    def outside(name: str) -> str:
        steps = [step for turn in found["turns"] if turn["arm"] == name for step in turn["steps"]]
        spent = sum(step["step_s"] - step["rollout_s"] for step in steps)
        return f"{1000 * spent / sum(step['tokens'] for step in steps):.1f} s"

    body = []
    for name, of in found["ratios"].items():
        arm, cells = found["arms"][name], []
        for key in ("rollout", "rollout_per_token", "e2e", "e2e_per_token"):
            cells.append(f"{of[key]['pooled']:.2f}x ({of[key]['low']:.2f} to {of[key]['high']:.2f})")
        accepted = f"{arm['accept_length']:.2f}" if arm["accept_length"] else ""
        body.append([f"`{name}`", *cells, outside(name), accepted, f"{mean(arm['reward']):.2f}"])
    stock = found["arms"]["stock"]
    body.append(["`stock`", *[""] * 4, outside("stock"), "", f"{mean(stock['reward']):.2f}"])
    head = (
        "",
        "rollout",
        "per token",
        "step",
        "per token",
        "outside rollout, per 1,000 tokens",
        "accept length",
        "reward",
    )
    return rows(head, body)


def expectations() -> str:
    """The README's: what runs on the CPU came to."""
    run, control = load("e2e"), load("control")

    def faster(arm: str, what: str) -> str:
        of = run["ratios"][arm][what]
        return f"{of['pooled']:.2f}x ({of['low']:.2f} to {of['high']:.2f})"

    best = max((arm for arm in run["ratios"] if arm.startswith("vllm-")),
               key=lambda arm: run["ratios"][arm]["e2e_per_token"]["pooled"])  # fmt: skip
    arms = {
        "tlt": "TLT with a trained drafter",
        best: f"the fastest of vLLM's own with that drafter ({best.replace('vllm-', 'K=')})",
        "tlt-fresh": "TLT from a random drafter, in its first steps",
    }
    body: list[list[object]] = []
    for arm, words in arms.items():
        steps = f"{len(run['arms'][arm]['reward'])} steps, 95 %"
        body += [[f"{words}: rollout against stock verl, per token", faster(arm, "rollout_per_token"), steps]]
        body += [["whole step, likewise", faster(arm, "e2e_per_token"), ""]]
    summary = load("drafter_study")["summary"]
    online = [summary[name]["online_vs_frozen_accept_length_late"] for name in ("random", "generic", "in_domain")]
    gains = ", ".join(f"{percent(of['mean'], int(abs(of['mean']) < 0.1))} %" for of in online)
    along = "drafter trained along against left as it is, accept length that vLLM served late in a run"
    body.append([along, gains, "from a random, a foreign and an in-domain drafter"])
    formula = [
        score["pct_of_oracle"] for replay in control["replay"]
        for score in (
            replay["policies"]["goodput"], *control["replay_detail"][replay["name"]]["goodput_other_seeds"]
        )
    ]  # fmt: skip
    odd = [replay["pct_of_oracle"]["goodput"] for replay in control["foreign"]]
    for words, found in (
        ("draft length chosen, against an oracle, simulated", formula),
        ("the same on step costs that are not the policy's formula", odd),
    ):
        body.append([words, f"{min(found):.1f} % at worst, {median(found):.1f} % in the median", f"{len(found)} runs"])
    wait, own = control["overhead_us_p50"], control["vllm_us_p50"]
    share = f"{100 * wait / own:.1f} % of what vLLM's own scheduler takes"
    body.append(["what an engine step of 256 requests waits for the choice", f"{wait:.0f} µs", share])
    return rows(("", "", ""), body)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (same_tokens, oracles, drain, residuals, clusters, control_by_batch, control_plane, resumptions,
                  growth, stops, overhead, tap, objectives, study, merging, merge_tree, packing, end_to_end,
                  foreign, expectations, savings, changing, mutation)
}  # fmt: skip


def render(page: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda block: f"<!-- table: {block[1]} -->\n{TABLES[block[1]]()}<!-- end -->", page)
