"""A whole RL run, step by step: rollout on every replica, training in the bubbles, merge, update, sync.

Each step is simulated twice on the same response lengths: as stock verl, and with TLT. All is repeatable by seed,
whatever the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from verl_tlt.simulate.idle_time import Spot, harvest
from verl_tlt.simulate.replica import Drained, EngineSpec, Floats, Replica, stock
from verl_tlt.simulate.workload import Distribution, Lengths, SimulationError
from verl_tlt.speculation.types import OFF

SMALL_BATCH = 32
"""Requests an engine decodes at once below which a rollout counts as its tail (the TLT paper's threshold)."""


@dataclass(frozen=True)
class Drafter:
    """How well a drafter guesses, and how it learns: conditional acceptance by position, first position first."""

    start: tuple[float, ...]
    """Of the drafter the run begins with."""
    ceiling: tuple[float, ...] = ()
    """Of one that has learned what it can; empty: it stays as it starts."""
    tokens: float = 1e6
    """Training tokens that close 63 % of what is left to the ceiling."""
    fade: float = 0.0
    """Share of what was learned that one policy update undoes."""

    def __post_init__(self) -> None:
        wrong = [a for a in (*self.start, *self.ceiling) if not 0.0 <= a <= 1.0]
        if wrong or not self.start or (self.ceiling and len(self.ceiling) != len(self.start)):
            raise SimulationError(
                "A drafter's acceptance is one number in 0..1 for each draft position, as many at its start as at its "
                f"ceiling, not {list(self.start)} and {list(self.ceiling)}."
            )

    def acceptance(self, learned: float) -> Floats:
        """After having learned this share of what there is to learn, [positions]."""
        start = np.asarray(self.start)
        return start + learned * (np.asarray(self.ceiling or self.start) - start)

    def trained(self, learned: float, tokens: float) -> float:
        """What is learned after so many tokens more."""
        return 1.0 - (1.0 - learned) * math.exp(-tokens / self.tokens)


@dataclass(frozen=True)
class Rest:
    """A step's seconds outside rollout, the same with TLT and without."""

    fixed_s: float = 0.0
    """Weight sync, reward that rollout does not hide, and whatever else does not depend on tokens."""
    token_s: float = 0.0
    """Log-probs and update, per token of prompts and responses, over the whole cluster."""


@dataclass(frozen=True)
class Scenario:
    """All that is simulated."""

    engine: EngineSpec
    replicas: int
    requests: int
    """Responses of a step."""
    lengths: Distribution
    drafter: Drafter
    prompt: int = 512
    rest: Rest = field(default_factory=Rest)
    spot: Spot = field(default_factory=Spot)
    overhead_s: float = 0.0
    """TLT's own seconds on the critical path of a step."""
    steps: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.replicas, self.requests, self.steps) < 1 or self.requests < self.replicas:
            raise SimulationError(
                "A simulation needs at least one replica, one RL step and a request for every replica, not "
                f"{self.replicas} replicas, {self.steps} steps and {self.requests} requests."
            )
        if len(self.drafter.start) < self.engine.arms[-1]:
            raise SimulationError(
                f"Acceptance is needed for each of {self.engine.arms[-1]} draft positions, not for "
                f"{len(self.drafter.start)}."
            )


@dataclass(frozen=True)
class StepResult:
    """One RL step; seconds."""

    step: int
    tokens: float
    stock_rollout_s: float
    rollout_s: float
    rest_s: float
    overhead_s: float
    bubble_s: float
    """Over all replicas."""
    used_s: float
    """Part of it in which they trained."""
    accept_length: float
    """Tokens per verified draft, the target's own included; 1 where nothing was drafted."""
    drafting: int
    """Replicas whose drafter ran."""
    draft_length: float
    """Mean K over engine steps."""
    learned: float
    """What the served drafter has learned, 0 to 1."""
    small_batch_share: float
    """Share of the stock rollout, over replicas that decode, at batches below `SMALL_BATCH`."""
    stock_bubble_share: float
    """Share of all replicas' time in the stock rollout that is bubble."""

    @property
    def rollout_ratio(self) -> float:
        """How many times as fast the rollout is as stock's."""
        return self.stock_rollout_s / self.rollout_s

    @property
    def stock_step_s(self) -> float:
        """The whole stock step."""
        return self.stock_rollout_s + self.rest_s

    @property
    def step_ratio(self) -> float:
        """How many times as fast the whole step is as stock's."""
        return self.stock_step_s / (self.rollout_s + self.rest_s + self.overhead_s)


class _Crew:
    """Replicas of one process, made there; kept from step to step."""

    replicas: list[Replica]
    spec: EngineSpec


def _begin(spec: EngineSpec, seeds: Sequence[Sequence[int]]) -> None:
    _Crew.spec, _Crew.replicas = spec, [Replica(spec, _seed(s)) for s in seeds]


def _decode(shares: Sequence[Lengths], prompt: int, believed: Floats, true: Floats) -> list[tuple[Drained, Drained]]:
    """(with TLT, stock) of each replica of this process."""
    return [
        (replica.rollout(lengths, prompt, believed, true), stock(_Crew.spec, lengths, prompt))
        for replica, lengths in zip(_Crew.replicas, shares, strict=True)
    ]


def _seed(parts: Sequence[int]) -> int:
    return int(np.random.SeedSequence(list(parts)).generate_state(1)[0])


def simulate(run: Scenario, jobs: int = 1, say: Callable[[StepResult], None] = lambda step: None) -> list[StepResult]:
    """Simulate a run.

    Args:
        run: what.
        jobs: processes to share the replicas among; the result does not depend on it.
        say: called after every step.
    """
    parts = [list(range(run.replicas))[i::jobs] for i in range(min(jobs, run.replicas))]
    with ExitStack() as open_pools:
        pools = []
        if len(parts) == 1:
            _begin(run.engine, [(run.seed, i) for i in parts[0]])
        else:
            for part in parts:
                seeds = [(run.seed, i) for i in part]
                pools.append(open_pools.enter_context(ProcessPoolExecutor(1, initializer=_begin,
                                                                          initargs=(run.engine, seeds))))  # fmt: skip

        def decode(shares: list[Lengths], believed: Floats, true: Floats) -> list[tuple[Drained, Drained]]:
            if not pools:
                return _decode(shares, run.prompt, believed, true)
            asked = [
                pool.submit(_decode, [shares[i] for i in part], run.prompt, believed, true)
                for pool, part in zip(pools, parts, strict=True)
            ]
            answers = (pair for a in asked for pair in a.result())
            found = dict(zip((i for part in parts for i in part), answers, strict=True))
            return [found[i] for i in range(run.replicas)]

        results = []
        for result in _steps(run, decode):
            say(result)
            results.append(result)
        return results


def _steps(run: Scenario, decode: Callable[..., list[tuple[Drained, Drained]]]) -> Iterator[StepResult]:
    learned = published = candidate = 0.0
    for step in range(1, run.steps + 1):
        rng = np.random.default_rng([run.seed, step])
        lengths = run.lengths.draw(rng, run.requests)
        shares = [lengths[i :: run.replicas] for i in range(run.replicas)]  # as even as verl's balancer deals them out
        pairs = decode(shares, run.drafter.acceptance(published), run.drafter.acceptance(learned))
        ours, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
        rollout_s, stock_s = max(d.seconds for d in ours), max(d.seconds for d in theirs)
        at_once = [min(s.size, run.engine.max_batch) for s in shares]
        account, tokens = harvest(run.spot, [d.seconds for d in ours], at_once, ready=step > 1)
        total = float(lengths.sum())
        yield StepResult(
            step=step,
            tokens=total,
            stock_rollout_s=stock_s,
            rollout_s=rollout_s,
            rest_s=run.rest.fixed_s + run.rest.token_s * (total + run.requests * run.prompt),
            overhead_s=run.overhead_s,
            bubble_s=sum(account.bubble_s.values()),
            used_s=sum(account.used_s.values()),
            accept_length=1.0 + sum(d.accepted for d in ours) / max(sum(d.drafts for d in ours), 1e-9),
            drafting=sum(d.drafting for d in ours),
            draft_length=_mean_k(ours),
            learned=learned,
            small_batch_share=_small_share(theirs),
            stock_bubble_share=1.0 - sum(d.seconds for d in theirs) / (stock_s * run.replicas),
        )
        if run.drafter.ceiling:
            published = candidate  # its scores came with this step's sessions, before these trained
            learned = published * (1.0 - run.drafter.fade)
            merged = tokens * (run.spot.merged if run.replicas > 2 else 1.0)
            candidate = run.drafter.trained(candidate * (1.0 - run.drafter.fade), merged)


def _mean_k(drained: Sequence[Drained]) -> float:
    steps = sum(d.steps for d in drained)
    return sum(max(k, 0) * n for d in drained for k, n in d.steps_by_k.items() if k != OFF) / max(steps, 1e-9)


def _small_share(drained: Sequence[Drained]) -> float:
    seconds = sum(sum(d.seconds_by_batch.values()) for d in drained)
    small = sum(s for d in drained for b, s in d.seconds_by_batch.items() if b < SMALL_BATCH)
    return small / seconds if seconds else 0.0


def mean_step(results: Sequence[StepResult]) -> StepResult:
    """The step in the middle of a run, as it were: means of all figures, whose ratios are those of the sums."""
    means: dict[str, Any] = {f.name: float(np.mean([getattr(r, f.name) for r in results])) for f in fields(StepResult)}
    return StepResult(**means | {name: round(means[name]) for name in ("step", "drafting")})


def total_ratios(results: Sequence[StepResult]) -> tuple[float, float]:
    """(rollout, whole step): how many times as fast as stock over all steps, seconds summed."""
    rollout = sum(r.stock_rollout_s for r in results) / sum(r.rollout_s for r in results)
    step = sum(r.stock_step_s for r in results) / sum(r.rollout_s + r.rest_s + r.overhead_s for r in results)
    return rollout, step
