"""Which draft-length policy is fastest, and what it costs: prints the tables, writes benchmarks/results/control.json.

    python -m benchmarks.control [--replay] [--foreign] [--overhead]
    python -m benchmarks.control --drain [--repetitions N]
    python -m benchmarks.control --fixed [--repetitions N]
    python -m benchmarks.control --steady [--batches N ...] [--turns N]

Without a part named, all run: `--replay` simulates rollouts against oracles (minutes), `--foreign` so too on step costs
that are not the formula which the policy fits (a quarter of an hour), `--drain` decodes on real vLLM CPU engines (about
a quarter of an hour; the first time it trains a drafter, some minutes more), `--fixed` meets vLLM's own fixed K with a
warmed-up drafter (an hour at most; the first time it makes one, a quarter of an hour more), `--overhead` counts what
control adds to an engine step, `--steady` compares steps without drafts with stock's. A part that is not run keeps its
figures of the last time.
The drain also draws K against batch over one rollout (docs/k-against-batch.svg); with `--record` its step times
become the ones that the replay replays as "CPU engine". Wall-clock timings mean something only on an idle machine;
`--clock cpu` counts CPU seconds of the engine's process instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.parts import machine
from demo.machine import find_dtype, say_dtype

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "control.json"
TOY = ROOT / ".cache" / "toy"
PLOT = ROOT / "docs" / "k-against-batch.svg"
console = Console(width=150)


def replay_table(results: list[dict[str, Any]], detail: dict[str, Any]) -> Table:
    """Speed in percent of the oracle O3."""
    table = Table(title="Replay: speed in % of O3 (the best K at every step, known in advance)")
    numbers = ("O3, s", "off", "O1", "O2", "table", "ema", "bandit", "goodput", "of 5 seeds", "cold", "worst bucket")
    for head in ("replay", *numbers, "O1 is", "misses"):
        table.add_column(head, justify="right" if head in numbers else "left")
    for result in results:
        scores, more = result["policies"], detail[result["name"]]
        row = [scores[n]["pct_of_oracle"] for n in ("off", more["O1"])] + [more["O2_pct"]]
        row += [scores[n]["pct_of_oracle"] for n in ("table", "ema", "bandit", "goodput")]
        row += [min(scores["goodput"]["pct_of_oracle"], *(s["pct_of_oracle"] for s in more["goodput_other_seeds"]))]
        row += [more["cold_pct"]]
        table.add_row(
            result["name"],
            f"{result['oracle_s']:.1f}",
            *(f"{value:.2f}" for value in row),
            f"{scores['goodput']['worst_bucket_vs_off']:.3f}",
            more["O1"],
            "; ".join(more["misses"]),
        )
    return table


def drain_table(drain: dict[str, Any], detail: dict[str, Any]) -> Table:
    """Tokens per second on a real engine; goodput against every arm, pooled, and what K is worth."""
    runs, speeds = drain["runs"], drain["tok_per_s"]
    accepted = f"accept length {drain['accept_length']} at K=7"
    table = Table(title=f"Drain 64 to 1 on a vLLM CPU engine: {runs} runs, {accepted}")
    for head in ("arm", "tok/s, median", "min", "max", "over off", "goodput over it", "K, % of the best"):
        table.add_column(head, justify="left" if head == "arm" else "right")
    for name, speed in speeds.items():
        figures = [f"{speed[key]:.1f}" for key in ("median", "min", "max")]
        ratios = [detail[over][name] for over in ("over_off", "goodput_over")]
        worth = detail["worth_pct"].get(name)
        pooled = [f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ratios]
        table.add_row(name, *figures, *pooled, f"{worth:.2f}" if worth else "")
    return table


def draw(steps: list[list[float]], path: Path) -> None:
    """K and batch over the seconds of one rollout."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "verl-tlt"
    from matplotlib import pyplot

    seconds, batch, k = zip(*steps, strict=True)
    figure, above = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    above.step(seconds, batch, where="post", color="tab:gray")
    above.set(xlabel="seconds of the rollout", ylabel="requests decoding", yscale="log", ylim=(0.9, 100))
    below = above.twinx()
    below.plot(seconds, k, ".", markersize=3, color="tab:blue")
    below.set(ylabel="K, tokens drafted", ylim=(-0.3, 7.3))
    below.yaxis.label.set_color("tab:blue")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("replay", "foreign", "drain", "fixed", "overhead", "steady"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--repetitions", type=int, default=9, help="of every arm of drain and fixed")
    parser.add_argument("--seconds", type=float, default=900.0, help="no repetition of these starts after so long")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="of the steady part")
    parser.add_argument("--turns", type=int, default=7, help="of its four arms, at every batch")
    parser.add_argument("--record", action="store_true", help="the drain's step times replace those of the replay")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine shared with others")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the replay")
    parser.add_argument("--toy", type=Path, default=TOY, help="where policy and drafter are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    simulated = options.replay or options.foreign
    engines = options.drain or options.fixed or options.overhead or options.steady
    everything = not (simulated or engines)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    if engines or everything:
        console.print(say_dtype(find_dtype()))
    if options.overhead or everything:
        found |= _overhead() | {"overhead_on": machine()}
        console.print({key: value for key, value in found.items() if "_us_" in key})
    if options.steady or everything:
        from benchmarks.control.drain import cost_of_control
        from benchmarks.control.toy import prepare

        found |= cost_of_control(prepare(options.toy), options.clock, console.print, options.batches, options.turns)
        found["steady_on"] = machine()
        console.print(f"K=0 under control against vLLM's own K=0: {100 * found['off_overhead']:+.1f} %")
    if options.drain or everything:
        from benchmarks.control.drain import drain
        from benchmarks.control.toy import prepare

        toy = prepare(options.toy)
        found |= drain(toy, options.repetitions, options.seconds, options.clock, console.print, options.record)
        draw(found.pop("goodput_rollout"), PLOT)
        found["drain_on"] = machine()
        console.print(drain_table(found["drain"], found["drain_detail"]))
    if options.fixed or everything:
        from benchmarks.control.fixed import against_fixed, bench_toy

        found["fixed"] = against_fixed(bench_toy(options.toy), options.repetitions, options.seconds, console.print)
        found["fixed_on"] = machine()
    if options.replay or everything:
        from benchmarks.control.replay import run_all

        found |= run_all(console.print, options.jobs) | {"replay_on": machine()}
        console.print(replay_table(found["replay"], found["replay_detail"]))
    if options.foreign or everything:
        from benchmarks.control import foreign

        found |= foreign.run_all(console.print, options.jobs) | {"foreign_on": machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"written to {options.out}")


def _overhead() -> dict[str, Any]:
    """In a process of its own, whose vLLM is told before its import that it runs on a CPU."""
    from benchmarks.control.engine import ENVIRONMENT

    command = [sys.executable, "-m", "benchmarks.control.overhead"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return {**{k: v for k, v in found.items() if "_us_" in k}, "overhead_detail": found}


if __name__ == "__main__":
    main()
