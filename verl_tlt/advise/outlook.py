"""From a recipe, and what a run of it showed, to simulated runs: one as it should be, one at each end of the range.

What neither says is assumed, and every assumption is listed. The two ends differ in what decides and is known least:
how often drafts are accepted, and how soon a step computes instead of reading weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from verl_tlt.advise.hardware import Gpu, Shape, drafter_tokens_s, step_cost, update_token_s
from verl_tlt.advise.seen import Seen
from verl_tlt.doctor.workload import Workload
from verl_tlt.errors import TLTError
from verl_tlt.simulate.costs import CostModel, LearnedCost, RooflineCost
from verl_tlt.simulate.idle_time import Spot
from verl_tlt.simulate.replica import EngineSpec
from verl_tlt.simulate.run import Drafter, Rest, Scenario, StepResult, mean_step, simulate
from verl_tlt.simulate.workload import Distribution, LogNormal, from_moments
from verl_tlt.speculation.types import OFF

ACCEPTANCE = {
    "low": (0.55, 0.50, 0.46, 0.43, 0.40, 0.38, 0.36),
    "likely": (0.72, 0.67, 0.63, 0.60, 0.57, 0.55, 0.53),
    "high": (0.88, 0.83, 0.79, 0.75, 0.72, 0.70, 0.68),
}
"""Conditional acceptance by position of a drafter that is trained along: accept lengths of 1.95, 2.5 and 3.2 at K=3.
The TLT paper's adapted drafter is at 3.5 (Fig. 16), the one that this project's toy ends with at 2.0 to 2.9."""
AROUND_MEASURED = {"low": 0.9, "likely": 1.0, "high": 1.05}
"""Factors on an acceptance that a run showed: policy and drafter go on changing."""
SHARPNESS = {"low": 1.065, "likely": 2.0, "high": 4.0}
"""Of the roofline; the lowest is what the paper's Table 4 fits."""
SPREAD = {"low": 0.15, "likely": 0.1, "high": 0.0}
"""Relative standard deviation of acceptance between responses: a rollout waits for the one that is guessed worst."""
MEDIAN_SHARE, SIGMA = 1 / 10, 1.0
"""Median response over the longest allowed, and the spread of the logarithm: one response in a hundred is cut."""
OVERHEAD_S = 0.5
"""TLT's own work on the critical path of a step; the toy's steps have 0.1 to 0.4 s."""
FIXED_S = 5.0
"""Weight sync, and reward that rollout does not hide."""
SETTINGS = ("low", "likely", "high")
ENOUGH = 1024
"""Responses over which a rollout's luck evens out; a step with fewer is simulated up to four times."""


@dataclass(frozen=True)
class Case:
    """Everything known and assumed about a run."""

    work: Workload
    shape: Shape
    gpu: Gpu
    arms: tuple[int, ...]
    spot: bool
    """Idle time trains the drafter."""
    has_drafter: bool
    """The recipe names a drafter to start from."""
    seen: Seen | None = None
    acceptance: tuple[float, ...] = ()
    """Given by the user; empty: measured or assumed."""
    response: float | None = None
    """Mean response in tokens, given by the user."""
    reward_s: float = 0.0
    """Seconds that reward adds to a step, given by the user."""
    seed: int = 0


@dataclass
class Outlook:
    """Simulated runs by setting, and what they rest on."""

    results: dict[str, StepResult] = field(default_factory=dict)
    costs: dict[str, CostModel] = field(default_factory=dict)
    acceptance: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rest_s: float = 0.0
    spot: Spot = field(default_factory=Spot)
    lengths: Distribution | None = None
    assumed: list[tuple[str, str]] = field(default_factory=list)
    """(what, value and why)."""

    def assume(self, what: str, why: str) -> None:
        """Note an assumption, once."""
        if (what, why) not in self.assumed:
            self.assumed.append((what, why))


def look_ahead(case: Case) -> Outlook:
    """Simulate RL steps of the run at every setting, with a drafter that has been trained already.

    Raises:
        TLTError: the recipe asks for no work, or what was logged contradicts it.
    """
    work, found = case.work, Outlook()
    if work.requests < 1 or work.replicas < 1:
        raise TLTError("data.train_batch_size, trainer.nnodes and trainer.n_gpus_per_node must ask for some work.")
    found.lengths = _lengths(case, found)
    prompt = round(case.seen.prompt_mean) if case.seen and case.seen.prompt_mean else max(1, work.prompt // 4)
    if not (case.seen and case.seen.prompt_mean):
        found.assume("mean prompt", f"{prompt} tokens, a quarter of data.max_prompt_length")
    found.rest_s, rest = _rest(case, found)
    per_step = drafter_tokens_s(case.shape, case.gpu, work.tensor_parallel)
    found.spot = Spot(tokens_per_s=per_step if case.spot else 0.0)
    overhead = case.seen.overhead_s if case.seen and case.seen.overhead_s is not None else OVERHEAD_S
    if overhead == OVERHEAD_S:
        found.assume("TLT's own work in a step", f"{OVERHEAD_S} s")
    for setting in SETTINGS:
        cost, found.acceptance[setting] = _cost(case, setting, found), _accepted(case, setting, found)
        found.costs[setting] = cost
        arms = usable(cost, case.arms)
        prefill = cost.token_s if isinstance(cost, RooflineCost) else 0.0
        engine = EngineSpec(cost, arms, max_batch=work.max_num_seqs, prefill_token_s=prefill, spread=SPREAD[setting])
        run = Scenario(
            engine, work.replicas, max(work.requests, work.replicas), found.lengths, Drafter(found.acceptance[setting]),
            prompt, rest, found.spot, overhead, steps=min(4, math.ceil(ENOUGH / max(work.requests, 1))), seed=case.seed,
        )  # fmt: skip
        found.results[setting] = mean_step(simulate(run))
    return found


def _lengths(case: Case, found: Outlook) -> Distribution:
    work, seen = case.work, case.seen
    if seen is not None:
        return from_moments(seen.response_mean, seen.response_max, seen.clipped, work.requests, work.response)
    if case.response is not None:
        found.assume("spread of lengths", f"log-normal, sigma {SIGMA}, around the mean that was given")
        return _around(case.response, work.response)
    found.assume(
        "response lengths", f"log-normal, median {work.response * MEDIAN_SHARE:.0f} (a tenth of "
        f"data.max_response_length), sigma {SIGMA}: one in a hundred is cut; --metrics or --response-length is better",
    )  # fmt: skip
    return LogNormal(work.response * MEDIAN_SHARE, SIGMA, work.response)


def _around(mean: float, limit: int) -> LogNormal:
    """The cut log-normal of the usual spread with this mean."""
    if not 1 <= mean <= limit:
        raise TLTError(f"--response-length must be between 1 and data.max_response_length={limit}, not {mean:g}.")
    low, high = 1e-3, 4.0 * limit
    for _ in range(60):
        median = float(np.sqrt(low * high))
        drawn = LogNormal(median, SIGMA, limit).draw(np.random.default_rng(0), 4096)
        low, high = (median, high) if drawn.mean() < mean else (low, median)
    return LogNormal(high, SIGMA, limit)


def _rest(case: Case, found: Outlook) -> tuple[float, Rest]:
    """Seconds of a step outside rollout, measured or from the policy's size."""
    if case.seen is not None:
        return case.seen.rest_s, Rest(fixed_s=case.seen.rest_s)
    work = case.work
    token_s = update_token_s(case.shape, case.gpu, work.gpus, work.critic, work.reference)
    found.assume(
        "outside rollout", f"log-probs and update at 30 % of the data sheet's FLOP/s on {work.gpus} GPUs, and "
        f"{FIXED_S + case.reward_s:g} s for weight sync and reward; --metrics or --reward-seconds says better",
    )  # fmt: skip
    rest = Rest(FIXED_S + case.reward_s, token_s)
    mean = float(found.lengths.draw(np.random.default_rng(0), 4096).mean()) if found.lengths else 0.0
    return rest.fixed_s + token_s * work.requests * mean, rest


def _cost(case: Case, setting: str, found: Outlook) -> CostModel:
    """A run's own step costs where it drafted, else the data sheet's."""
    sheet = step_cost(case.shape, case.gpu, case.work.tensor_parallel, case.work.eager, SHARPNESS[setting])
    if case.seen is not None and case.seen.costs.points:
        arms = case.seen.costs.arms()
        if {OFF, 0} & set(arms) and arms[-1] > 0:
            return LearnedCost(case.seen.costs)
        found.assume("cost of drafts", "from the data sheet: the run has not drafted")
    found.assume("step costs", "the GPU's data sheet: 90 % of its bandwidth, 40 % of its FLOP/s")
    return sheet


def _accepted(case: Case, setting: str, found: Outlook) -> tuple[float, ...]:
    """Conditional acceptance by position, for every draft length that may be chosen."""
    need = case.arms[-1]
    given = case.acceptance or (case.seen.acceptance if case.seen else ())
    if not given:
        found.assume("acceptance", "accept length 1.95 to 3.2 at K=3, of a drafter that is trained along or made by "
                     "verl-tlt warmup; verl-tlt evaluate measures one")  # fmt: skip
        return ACCEPTANCE[setting][:need] + (ACCEPTANCE[setting][-1],) * max(0, need - len(ACCEPTANCE[setting]))
    extended = (*given[:need], *(given[-1] for _ in range(need - len(given))))
    return tuple(float(np.clip(a * AROUND_MEASURED[setting], 0.0, 1.0)) for a in extended)


def accept_length(acceptance: tuple[float, ...], k: int) -> float:
    """Tokens of a pass that verifies k drafted tokens."""
    return float(1.0 + np.cumprod(acceptance[:k]).sum())


def usable(cost: CostModel, arms: tuple[int, ...]) -> tuple[int, ...]:
    """The draft lengths whose cost is known: a run says nothing of longer drafts than its own."""
    return tuple(k for k in arms if not isinstance(cost, LearnedCost) or k <= cost.longest)


def break_even(
    cost: CostModel, batches: tuple[int, ...], arms: tuple[int, ...], context: int
) -> dict[int, dict[int, float]]:
    """By batch and K: the accept length above which a draft pays."""
    lengths = [k for k in usable(cost, arms) if k > 0]
    return {
        b: {k: cost.seconds(b, b * context, k, k) / cost.seconds(b, b * context, 0, OFF) for k in lengths}
        for b in batches
    }
