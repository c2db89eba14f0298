"""Tables about long runs and killed runs."""

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


def growth() -> str:
    """How fast memory, threads and files grow over hundreds of steps."""
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
    """TLT's own work in a step, by part."""
    found = load("endurance")["overhead"]
    body = [
        [name.replace("_", " "), f"{1000 * of['median_s']:.0f} ms", f"{100 * of['share']:.2f} %"]
        for name, of in found["phases"].items()
    ]
    whole = ["**together**", f"**{1000 * found['median_s']:.0f} ms**", f"**{100 * found['share']:.2f} %**"]
    return rows((f"of steps of {found['median_step_s']} s", "median", "of all steps' time"), [*body, whole])
