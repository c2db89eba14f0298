"""Real GRPO runs in which something of TLT fails, one fault after the other: `make test-faults`.

    python -m benchmarks.faults [--out DIR] [--only TEXT ...]

Seven runs of the toy on the CPU, two replicas each: TLT with every fault that a run must survive; stock verl as the
yardstick; the same pair, shorter, with the gate and a fault while it scores; both with the fault that ends stock verl,
too; and TLT with an engine that is killed while it reloads. All train on the responses that the first run sampled
(`replay.py`), so updates are compared with stock verl's to the bit. The verdicts go to
`benchmarks/results/faults.json`; what is not as it should be is printed, and makes the exit status 1.

`--only` makes a short run of the faults whose names hold one of the texts, and writes nothing.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.judge import Evidence, row, wrong
from benchmarks.faults.plan import (
    ENGINE_KILLED,
    FAULTS,
    SAVE_EVERY,
    SCORED_STEPS,
    SERVER_KILLED,
    STEPS,
    STOPPED_IN_SCORING,
    WITH_GATE,
    Fault,
)
from benchmarks.faults.run import ROOT, FaultRun, run
from benchmarks.stored import store
from verl_tlt.commands.report.reader import read_trace

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
KILLED_STEPS = 4
FIRST, SAVES = 3, 5
"""Step of the first of a few faults, and steps between their checkpoints."""


def weights(out: Path, step: int) -> list[bytes]:
    """The actor's tensors of a checkpoint, as they lie in torch's archives."""
    found = []
    for path in sorted((out / "checkpoints" / f"global_step_{step}" / "actor").glob("model_world_size_*.pt")):
        with zipfile.ZipFile(path) as archive:
            found += [archive.read(name) for name in sorted(archive.namelist()) if "/data/" in name]
    return found


def evidence(tlt: FaultRun, stock: FaultRun, steps: int) -> Evidence:
    """What a run with TLT and one without say."""
    last = weights(tlt.out, steps)
    late = tlt.out.with_name(f"{tlt.out.name}-armed") / "late-request"
    folders = (tlt.out / "checkpoints").glob("global_step_*/tlt_drafter/model.safetensors")
    return Evidence(
        ended=tlt.status == 0 and sorted(tlt.steps) == list(range(1, steps + 1)),
        steps=tlt.steps,
        stock=stock.steps,
        trace=read_trace(tlt.out / "trace"),
        log=tlt.log,
        fired=tlt.fired,
        same_weights=bool(last) and last == weights(stock.out, steps),
        late_request=late.read_text() if late.exists() else "",
        saved=[int(path.parents[1].name.rpartition("_")[2]) for path in folders],
    )


def kind(left: str) -> str:
    """What it is, without what is random in its name."""
    return re.sub(r"^tmp\w{8}|[0-9a-f-]{8,}", "*", left.rpartition("/")[2])


def say(what: FaultRun) -> None:
    print(f"{what.out.name}: {len(what.steps)} steps in {what.seconds:.0f} s, exit status {what.status}", flush=True)
    for left in what.left:
        print(f"  left behind: {left}")


def survivable(
    out: Path,
    faults: Sequence[Fault] = FAULTS,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
    name: str = "faults",
    overrides: Sequence[str] = (),
) -> tuple[list[dict], list[str]]:
    """A run beside stock verl: rows, and complaints."""
    tlt = run(name, out, steps, faults, save_every=save_every, overrides=overrides)
    say(tlt)
    stock = run(f"{name}-stock", out, steps, (), tlt=False, save_every=save_every)
    say(stock)
    seen = evidence(tlt, stock, steps)
    rows, complaints = [], []
    for fault in faults:
        rows.append(row(fault, seen))
        complaints += [f"{fault.name}: {what}" for what in wrong(fault, rows[-1], seen)]
    if more := {kind(name) for name in tlt.left} - {kind(name) for name in stock.left}:
        complaints.append(f"left behind, and not by stock verl: {', '.join(sorted(more))}")
    return rows, complaints


def scored(out: Path) -> tuple[list[dict], list[str]]:
    """The run with the gate."""
    return survivable(out, [STOPPED_IN_SCORING], SCORED_STEPS, SCORED_STEPS, "gate", WITH_GATE)


def fatal(out: Path, texts: Sequence[str] = ("",)) -> tuple[list[dict], list[str]]:
    """What ends a run: a rollout server killed, with TLT as with stock verl and as soon; an engine, which TLT asks."""
    rows, complaints, ended = [], [], {}
    for fault, name, tlt in (
        (SERVER_KILLED, "stock verl", False), (SERVER_KILLED, "TLT", True), (ENGINE_KILLED, "TLT", True)
    ):  # fmt: skip
        if not any(text in fault.name for text in texts):
            continue
        folder = f"{fault.note('m:f').removesuffix('-f')}-{name.split()[0].lower()}"
        one = run(folder, out, KILLED_STEPS, [fault], tlt=tlt)
        say(one)
        ended[fault.name, name] = one
        label = f"{fault.name}: {name}" if fault is SERVER_KILLED else fault.name
        whole = len(one.steps) == KILLED_STEPS
        said = {"survived": one.status == 0, "policy_updates_equal": whole, "recovered": False, "counter": None}
        rows.append({"fault": label, **said})
        if not one.fired:
            complaints.append(f"{label}: it never struck")
        if one.status == -1:
            complaints.append(f"{label}: the run hangs")
        if fault.log not in one.log:
            complaints.append(f"{label}: no line of the log says {fault.log!r}")
    steps = {name: len(one.steps) for (fault, name), one in ended.items() if fault == SERVER_KILLED.name}
    if steps and steps["TLT"] < steps["stock verl"]:
        complaints.append(f"{SERVER_KILLED.name}: {steps['TLT']} steps with TLT, {steps['stock verl']} without")
    return rows, complaints


def a_few(out: Path, texts: Sequence[str]) -> tuple[list[dict], list[str]]:
    """The faults whose names hold one of the texts, those that a run survives one after the other."""
    rows, complaints = fatal(out, texts)
    if any(text in STOPPED_IN_SCORING.name for text in texts):
        more, of_them = scored(out)
        rows, complaints = rows + more, complaints + of_them
    moved, step = [], FIRST
    for fault in FAULTS:
        if any(text in fault.name for text in texts):
            moved.append(replace(fault, step=min(fault.step, step)))
            step += fault.takes
    if not moved:
        return rows, complaints
    more, of_them = survivable(out, moved, step + SAVES, SAVES)
    return rows + more, complaints + of_them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out/faults"))
    parser.add_argument("--only", nargs="+", metavar="TEXT")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.only:
        rows, complaints = a_few(out, args.only)
    else:
        rows, complaints = [], []
        for part in (survivable, scored, fatal):
            found, wrong_ones = part(out)
            rows, complaints = rows + found, complaints + wrong_ones
        store(RESULTS, {"runs": rows})
    for line in rows:
        print(json.dumps(line))
    for complaint in complaints:
        print("WRONG:", complaint)
    raise SystemExit(1 if complaints else 0)


if __name__ == "__main__":
    main()
