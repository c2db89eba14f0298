"""A made-up run with the shape of a real one: some replicas, long-tailed responses, a drafter that learns.

What the tests need to know of it is returned with the directory, so that they compare with numbers and not with
what the code under test computed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trace.metrics import StepObservations, step_metrics

KMAX = 5
BATCH = 32
ALPHAS = (0.01, 0.18, 0.42, 0.58, 0.64, 0.67, 0.69)
"""Conditional acceptance after each step."""


@dataclass
class MadeRun:
    """Where the run is, and the truth about it, by RL step."""

    directory: Path
    rollout_s: dict[int, float] = field(default_factory=dict)
    idle_replica: dict[int, str] = field(default_factory=dict)
    """The first to run dry; of two the only one."""
    bubble_s: dict[int, float] = field(default_factory=dict)
    """Over all replicas."""
    saved_s: dict[int, float] = field(default_factory=dict)
    accept_length: dict[int, float] = field(default_factory=dict)


def choose_k(batch: int, alpha: float) -> int:
    """A table as a policy would measure it: nothing with a bad drafter, longer drafts in the tail."""
    if alpha < 0.3:
        return 0
    return 1 if batch > 24 else 3 if batch > 8 else KMAX


def decode(rng, start: float, alpha: float, lengths) -> list[dict]:
    """Engine steps of one replica until its last response is done."""
    left = np.array(lengths, dtype=float)
    t, kv, rows = start, 20.0 * len(left), []
    while (left > 0).any():
        batch = int((left > 0).sum())
        k = choose_k(batch, alpha)
        taken = np.minimum(rng.geometric(1 - alpha, size=batch) - 1, k) if k else np.zeros(batch, int)
        accepted = [int((taken >= i + 1).sum()) for i in range(k)]
        latency = 0.018 + 0.0007 * batch * (1 + k) + 0.002 * k
        t += latency
        left[left > 0] -= 1 + taken
        kv += batch + int(taken.sum())
        row = {"t": t, "batch": batch, "kv": int(kv), "k": k, "verified": k, "drafts": batch if k else 0}
        row |= {"accepted": accepted, "produced": batch + int(taken.sum()), "latency_s": latency, "clean": True}
        rows.append(row)
    return rows


def stock_s(row: dict) -> float:
    """Seconds that the tokens of an engine step cost without a drafter."""
    return row["produced"] / row["batch"] * (0.018 + 0.0007 * row["batch"])


def make_run(directory: Path, steps: int = 6, seed: int = 3, replicas: int = 2) -> MadeRun:
    """Write a whole run's trace."""
    names = tuple(f"replica-{i}" for i in range(replicas))
    rng, made, clock = np.random.default_rng(seed), MadeRun(directory), SimpleNamespace(now=1_800_000_000.0)
    driver = TraceWriter(directory, "trainer", lambda: clock.now)
    engines = {r: TraceWriter(directory, f"engine-{r}") for r in names}
    config, drafter = {"speculation": {"max_draft_length": KMAX}}, str(directory / "drafter")
    driver.emit("run", step0=1, replicas=names, gpus=replicas, config=config, policy="toy", drafter=drafter)
    alpha, version = 0.01, 0
    for step in range(1, steps + 1):
        start = clock.now
        lengths = {r: np.clip(rng.lognormal(4.4, 0.75, BATCH), 20, 900) for r in names}
        busy = names[step % replicas]
        lengths[busy][0] = 450 + 60 * (step % 3)  # the long one that keeps its replica busy
        lengths |= {r: np.minimum(lengths[r], 180) for r in names if r != busy}
        decoded = {r: decode(rng, start, alpha, lengths[r]) for r in names}
        end = max(rows[-1]["t"] for rows in decoded.values())
        idle_from = {r: rows[-1]["t"] for r, rows in decoded.items() if rows[-1]["t"] < end}
        sessions = {r: t + 0.35 for r, t in idle_from.items() if step > 1 and end - t - 0.35 > 0.5}
        for r in names:
            for row in decoded[r]:
                engines[r].write(row)
        for now in np.arange(start, end, 0.1):
            clock.now = float(now)
            inflight = {r: next((row["batch"] for row in decoded[r] if row["t"] >= now), 0) for r in names}
            driver.emit("load", step=step, inflight=inflight)
        for r, since in idle_from.items():
            driver.emit("idle", step=step, replica=r, start=since)
        clock.now = end + 0.06
        driver.emit("phase", step=step, name="rollout", start=start, end=clock.now)
        for r, begin in sessions.items():
            trained = {"steps": 5, "tokens": 2560, "epochs": 1.2, "loss": 6.0 / step, "outcome": "stopped"}
            driver.emit("session", step=step, replica=r, start=begin, end=end + 0.05, stop_latency_s=0.05, **trained)
        for name, seconds in (("old_log_prob", 1.2), ("update_actor", 2.9), ("update_weights", 0.25)):
            driver.emit("phase", step=step, name=name, start=clock.now, end=clock.now + seconds)
            clock.now += seconds
        if sessions:
            version += 1
            tau = {"candidate": 1.0 + step / 4, "served": 1.0 + (step - 1) / 4, "initial": 1.01}
            driver.emit("publish", step=step, version=version, decision="published", tau=tau, bytes=2**20)
        for r in names:
            driver.emit("reload", step=step, replica=r, version=version, ok=True, seconds=0.01)
        clock.now += 0.2
        made.rollout_s[step], made.idle_replica[step] = end - start, min(idle_from, key=idle_from.__getitem__)
        made.bubble_s[step] = sum(end - t for t in idle_from.values())
        made.saved_s[step] = max(start + sum(map(stock_s, rows)) for rows in decoded.values()) - end
        stats = {r: _stats(decoded[r]) for r in names}
        observations = StepObservations(
            replicas=stats, idle_s={r: end - t for r, t in idle_from.items()},
            trained_s=sum(end - t for t in sessions.values()),
            overhead={"stop": 0.05, "publish": 0.02}, served_version=version,
            spot_failures=0, saved_s=made.saved_s[step],
        )  # fmt: skip
        tokens = sum(s.num_generation_tokens for s in stats.values())
        verl = {
            "critic/score/mean": 0.70 + 0.03 * step, "timing_s/step": clock.now - start,
            "timing_s/gen": end + 0.06 - start, "timing_s/old_log_prob": 1.2, "timing_s/update_actor": 2.9,
            "response_length/mean": tokens / (BATCH * replicas), "prompt_length/mean": 20.0,
            "response_length/max": max(float(x.max()) for x in lengths.values()),
            "perf/total_num_tokens": tokens + 20 * BATCH * replicas, "training/rollout_probs_diff_max": 2e-6,
        }  # fmt: skip
        driver.emit("step", step=step, metrics={**verl, **step_metrics(observations)})
        drafts = sum(s.num_drafts for s in stats.values())
        accepted = sum(sum(s.num_accepted_tokens_per_pos) for s in stats.values())
        made.accept_length[step] = 1 + accepted / drafts if drafts else 1.0
        alpha = ALPHAS[min(step, 6)]
    assert not any(writer.failures for writer in (driver, *engines.values()))
    return made


def _stats(rows: list[dict]) -> EngineStats:
    ks, tokens = [row["k"] for row in rows], sum(row["produced"] for row in rows)
    accepted = (sum(row["accepted"][i] for row in rows if row["k"] > i) for i in range(KMAX))
    return EngineStats(
        num_steps=len(rows), num_generation_tokens=tokens, num_decode_tokens=tokens,
        num_passes=sum(row["batch"] for row in rows), num_drafts=sum(row["drafts"] for row in rows),
        num_draft_tokens_per_pos=tuple(sum(row["drafts"] for row in rows if row["k"] > i) for i in range(KMAX)),
        num_accepted_tokens_per_pos=tuple(accepted), steps_by_draft_length={k: ks.count(k) for k in set(ks)},
    )  # fmt: skip
