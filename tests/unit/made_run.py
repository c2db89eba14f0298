"""A made-up run: in every step one replica decodes to the end; the other one runs dry before, and trains the drafter.

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

NAMES = ("replica-0", "replica-1")
STEP_S, BATCH = 0.1, 8
"""Seconds of an engine step, and requests in it."""
ACCEPTED = (None, None, (2, 1, 0), (4, 2, 1), (6, 4, 2), (7, 5, 3))
"""Of 8 drafts by position, in each RL step; None: nothing is drafted."""


@dataclass
class MadeRun:
    """Where the run is, and the truth about it, by RL step."""

    directory: Path
    rollout_s: dict[int, float] = field(default_factory=dict)
    bubble_s: dict[int, float] = field(default_factory=dict)
    """Over all replicas."""
    saved_s: dict[int, float] = field(default_factory=dict)
    accept_length: dict[int, float] = field(default_factory=dict)
    """Of the steps in which something was drafted."""


def make_run(directory: Path) -> MadeRun:
    """Write a whole run's trace."""
    made, clock = MadeRun(directory), SimpleNamespace(now=1_800_000_000.0)
    driver = TraceWriter(directory, "trainer", lambda: clock.now)
    engines = {name: TraceWriter(directory, f"engine-{name}") for name in NAMES}
    config = {"speculation": {"max_draft_length": 3}}
    driver.emit("run", step0=1, replicas=NAMES, gpus=2, config=config, policy="toy")
    for step, accepted in enumerate(ACCEPTED, 1):
        start, busy, idle = clock.now, NAMES[step % 2], NAMES[1 - step % 2]
        counts = {busy: 60 + 8 * step, idle: 20 + step}  # engine steps
        for name, count in counts.items():
            for i in range(1, count + 1):
                engines[name].write(engine_row(start + i * STEP_S, accepted))
        end, idle_from = start + counts[busy] * STEP_S, start + counts[idle] * STEP_S
        for now in np.arange(start, end, STEP_S).tolist():
            clock.now = now
            load = {busy: BATCH, idle: BATCH if now < idle_from else 0}
            driver.emit("load", step=step, inflight=load)
        clock.now = end + 0.06
        driver.emit("phase", step=step, name="rollout", start=start, end=clock.now)
        version = step - 1  # nothing is trained on in the first step
        if version:
            trained = {"steps": 5, "tokens": 2560, "loss": 6.0 / step, "outcome": "stopped"}
            times = {"start": idle_from + 0.35, "end": end + 0.05}
            driver.emit("session", step=step, replica=idle, **times, **trained)
            tau = {"candidate": 1.0 + step / 4, "served": 1.0 + (step - 1) / 4, "initial": 1.01}
            driver.emit("publish", step=step, version=version, decision="published", tau=tau)
        for name, seconds in (("old_log_prob", 1.2), ("update_actor", 2.9), ("update_weights", 0.25)):
            driver.emit("phase", step=step, name=name, start=clock.now, end=clock.now + seconds)
            clock.now += seconds
        for name in NAMES:
            driver.emit("reload", step=step, replica=name, version=version, ok=True, seconds=0.01)
        made.rollout_s[step], made.bubble_s[step], made.saved_s[step] = end - start, end - idle_from, 1.5 * step
        if accepted:
            made.accept_length[step] = 1 + sum(accepted) / BATCH
        observations = StepObservations(
            replicas={name: engine_stats(count, accepted) for name, count in counts.items()},
            idle_s={idle: end - idle_from}, trained_s=end - idle_from - 0.35 if version else 0.0,
            overhead={"stop": 0.05, "publish": 0.02}, served_version=version, spot_failures=0,
            saved_s=made.saved_s[step],
        )  # fmt: skip
        verl = {
            "critic/score/mean": 0.70 + 0.03 * step, "timing_s/step": clock.now - start,
            "timing_s/gen": end + 0.06 - start, "timing_s/old_log_prob": 1.2, "timing_s/update_actor": 2.9,
            "response_length/mean": 60.0, "prompt_length/mean": 20.0, "response_length/max": 90.0,
            "perf/total_num_tokens": 80.0 * 2 * BATCH, "training/rollout_probs_diff_max": 2e-6,
        }  # fmt: skip
        driver.emit("step", step=step, metrics={**verl, **step_metrics(observations)})
    assert not any(writer.failures for writer in (driver, *engines.values()))
    return made


def engine_row(t: float, accepted: tuple[int, ...] | None) -> dict:
    return {"t": t, "batch": BATCH, "k": len(accepted or ()), "latency_s": STEP_S}


def engine_stats(count: int, accepted: tuple[int, ...] | None) -> EngineStats:
    k, tokens = len(accepted or ()), count * (BATCH + sum(accepted or ()))
    return EngineStats(
        num_steps=count, num_decode_tokens=tokens,
        num_drafts=count * BATCH if k else 0, num_draft_tokens_per_pos=(count * BATCH,) * k,
        num_accepted_tokens_per_pos=tuple(count * n for n in accepted or ()), steps_by_draft_length={k: count},
    )  # fmt: skip
