"""From the arms' rows to `drafter_study.json`, a plot, and the sentences' numbers.

    python -m benchmarks.drafter.study_report --out study --costs benchmarks/results/drafter_study_costs.json \
        --json benchmarks/results/drafter_study.json --plot docs/drafter-study.png

Accept lengths are measured (simulated accept length of three-token drafts on the step's own responses). Rollout seconds
are not: arms share one trajectory, so each arm's seconds come from a stated cost model, step latencies of vLLM on a CPU
applied to the step's real response lengths and the arm's acceptance. `--traces TRACE_DIR/engine-*.jsonl` makes the cost
file from the engine traces of a run (the demo's).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drafter.study import CONFIG, SCORED, SESSION_STEPS, STARTS, K
from benchmarks.drafter.trajectory import LEARNING_RATE, PROMPTS, SAMPLES, load_step
from benchmarks.simulate.recorded import recording, step_records
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

ARMS = ("none", "frozen", "online")
LATE = 20
"""The summary compares the last so many steps, and all."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t, two-sided 95 %, by degrees of freedom."""
COST_MODEL = (
    "Model, not wall time: one engine decodes the step's responses to their recorded lengths; a step of batch b with "
    "draft length k takes a line in b fitted to the step latencies of vLLM on a CPU core in a demo run (40M toy "
    "policy, which computes the same function) and yields 1 + the arm's measured chain of acceptances; k is the best "
    "of 0..3 at every batch, and no drafter pass runs while that is 0."
)


def lines(table: LatencyTable) -> dict[int, tuple[float, float]]:
    """By draft length, OFF included: seconds of a step as (at batch 0, per request), weighted by steps seen."""
    found = {}
    for k in table.arms():
        points = [p for p in table.points if p.draft_length == k]
        slope, start = np.polyfit(
            [p.batch for p in points], [p.seconds for p in points], 1, w=[p.samples**0.5 for p in points]
        )
        found[k] = float(start), float(slope)
    return found


def rollout_seconds(lengths: np.ndarray, counts: np.ndarray, cost: dict[int, tuple[float, float]]) -> float:
    """Seconds of a rollout on one engine, by expectation.

    Args:
        lengths: int [N], response lengths.
        counts: [1+K], drafts and how many of them had 1, 2, ..., K tokens accepted.
        cost: `lines`, with OFF and every K up to len(counts) - 1.
    """
    survival = counts[1:] / counts[0] if counts[0] else np.zeros(len(counts) - 1)
    tau = 1.0 + np.concatenate([[0.0], np.cumsum(survival)])  # [1+K], tokens per step at each draft length
    left = np.sort(lengths.astype(float))[::-1]
    done = seconds = 0.0
    for batch in range(len(left), 0, -1):  # until the shortest of those that remain has ended
        step = [cost[OFF if k == 0 else k] for k in range(len(tau))]
        per_token = [(start + slope * batch) / tau[k] for k, (start, slope) in enumerate(step)]
        seconds += (left[batch - 1] - done) * min(per_token)
        done = left[batch - 1]
    return seconds


def rows_of(out: Path, start: str, seed: int) -> list[dict[str, Any]]:
    """What an arm wrote."""
    return [json.loads(line) for line in (out / "variants" / f"{start}-{seed}.jsonl").read_text().splitlines()]


def collect(out: Path, seeds: list[int], cost: dict[int, tuple[float, float]]) -> dict[str, Any]:
    """The issue's format, with what explains it beside it."""
    arms: dict[str, dict[str, Any]] = {start: {arm: {"seeds": []} for arm in ARMS} for start in STARTS}
    notes: dict[str, Any] = {"reward": [], "decisions": {}, "trained_tokens": {}}
    by_seed = {seed: {start: rows_of(out, start, seed) for start in STARTS} for seed in seeds}
    steps = min(len(r) for rows in by_seed.values() for r in rows.values())
    for seed, rows in by_seed.items():
        recorded = [load_step(out / f"seed-{seed}" / f"step-{step:03d}.npz") for step in range(steps)]
        lengths = [np.array([len(s) - s.prompt_len for s in sequences]) for sequences, _, _ in recorded]
        notes["reward"].append([round(float(rewards.mean()), 4) for _, _, rewards in recorded])
        for start in STARTS:
            for arm in ARMS:
                which = {"none": None, "frozen": "frozen", "online": "served"}[arm]
                counts = [np.array(r[which]) if which else np.array([1.0]) for r in rows[start][:steps]]
                arms[start][arm]["seeds"].append(
                    {
                        "accept_length": [round(float(c.sum() / c[0]), 4) for c in counts],
                        "rollout_s": [
                            round(rollout_seconds(n, c, cost), 3) for n, c in zip(lengths, counts, strict=True)
                        ],
                    }
                )
            decided = [r.get("decision", "no session") for r in rows[start][:steps]]
            notes["decisions"].setdefault(start, []).append({d: decided.count(d) for d in sorted(set(decided))})
            notes["trained_tokens"].setdefault(start, []).append(sum(r["trained_tokens"] for r in rows[start][:steps]))
    same = [i for i, s in enumerate(seeds) if (out / f"seed-{s}").resolve() != (out / f"seed-{seeds[0]}").resolve()]
    return {"arms": arms, "steps": steps, "one_policy_run_for_all_seeds": not same, **notes}


def compare(arms: dict[str, Any], start: str, key: str, late: int | None) -> dict[str, Any]:
    """Online against frozen: ratio of the sums over steps, minus one, and its 95 % interval.

    Over seeds by Student's t; with one seed over its steps, by a bootstrap of blocks of five, which says nothing about
    other policy runs.
    """
    pairs = [
        tuple(np.array(s[key][-late:] if late else s[key]) for s in pair)
        for pair in zip(arms[start]["online"]["seeds"], arms[start]["frozen"]["seeds"], strict=True)
    ]
    ratios = [float(online.sum() / frozen.sum() - 1.0) for online, frozen in pairs]
    mean, n = float(np.mean(ratios)), len(ratios)
    if n > 1:
        half = T_95[n - 1] * float(np.std(ratios, ddof=1)) / math.sqrt(n)
        low, high = mean - half, mean + half
    else:
        online, frozen = pairs[0]
        starts = np.random.default_rng(0).integers(len(online) - 4, size=(2000, max(1, len(online) // 5)))
        rows = (starts[:, :, None] + np.arange(5)).reshape(2000, -1)  # [resamples, steps]
        low, high = np.quantile(online[rows].sum(1) / frozen[rows].sum(1) - 1.0, [0.025, 0.975])
    over = "seeds" if n > 1 else "blocks of five steps of one seed"
    return {"mean": round(mean, 4), "low": round(float(low), 4), "high": round(float(high), 4), "interval_over": over}


def summary(arms: dict[str, Any]) -> dict[str, Any]:
    """By start: accept lengths at the ends, and online against frozen."""
    out: dict[str, Any] = {}
    for start in STARTS:
        out[start] = {
            f"online_vs_frozen_{key}_{name}": compare(arms, start, key, late)
            for key in ("accept_length", "rollout_s")
            for name, late in (("all", None), (f"last{LATE}", LATE))
        }
        for arm in ("frozen", "online"):
            tau = np.array([s["accept_length"] for s in arms[start][arm]["seeds"]])  # [seeds, steps]
            out[start][f"{arm}_first10"] = round(float(tau[:, :10].mean()), 4)
            out[start][f"{arm}_last{LATE}"] = round(float(tau[:, -LATE:].mean()), 4)
        for arm in ARMS:
            seconds = np.array([s["rollout_s"] for s in arms[start][arm]["seeds"]])
            out[start][f"{arm}_rollout_s_total"] = round(float(seconds.sum(axis=1).mean()), 1)
    return out


def plot(arms: dict[str, Any], file: Path) -> None:
    """Accept length by step: mean of the seeds in windows of five steps, and a 95 % band over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(STARTS), figsize=(12, 3.6), sharey=True)
    for axis, start in zip(axes, STARTS, strict=True):
        for arm, colour in zip(ARMS, ("#888888", "#d95f02", "#1b6ca8"), strict=True):
            tau = np.array([s["accept_length"] for s in arms[start][arm]["seeds"]])  # [seeds, steps]
            seeds = len(tau)
            kernel = np.ones(5) / 5
            smooth = np.array([np.convolve(row, kernel, mode="valid") for row in tau])  # [seeds, steps - 4]
            x = np.arange(smooth.shape[1]) + 3
            mean = smooth.mean(axis=0)
            axis.plot(x, mean, color=colour, label=arm)
            if seeds > 1:
                half = T_95[seeds - 1] * smooth.std(axis=0, ddof=1) / math.sqrt(seeds)
                axis.fill_between(
                    x, np.maximum(mean - half, 1.0), np.minimum(mean + half, K + 1), color=colour, alpha=0.15
                )
        axis.set_title(f"{start.replace('_', '-')} start")
        axis.set_xlabel("RL step")
        axis.set_ylim(0.9, K + 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"accept length (K={K})")
    axes[0].legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--costs", type=Path, required=True, help="step latencies, JSON")
    parser.add_argument("--traces", type=Path, nargs="+", default=[], help="engine traces to make --costs from")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    if options.traces:
        steps = step_records(line for file in options.traces for line in file.read_text().splitlines())
        options.costs.write_text(json.dumps({"points": recording(steps).table.to_list()}, indent=1) + "\n")
    cost = lines(LatencyTable.from_list(json.loads(options.costs.read_text())["points"]))
    found = collect(options.out, options.seeds, cost)
    found |= {
        "rollout_s_model": COST_MODEL,
        "accept_length_is": f"simulated accept length at temperature 1, K={K}, on the step's own responses",
        "settings": {
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "policy_learning_rate": LEARNING_RATE,
            "scored": f"every {SCORED}nd response of a step",
            "session_micro_batches": SESSION_STEPS, "tlt": CONFIG.to_dict(),
        },
        "summary": summary(found["arms"]),
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found) + "\n")
    plot(found["arms"], options.plot)
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
