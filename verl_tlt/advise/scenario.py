"""What a run would do: from its recipe, and what a run of it showed, to simulated rollouts at three settings.

The settings are the likely one and both ends of the range. They differ in what decides and is known least: how often
drafts are accepted, and how soon a step computes instead of reading weights. What neither recipe nor run says is
assumed, and every assumption is listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_tlt.advise.hardware import Gpu, Shape, drafter_tokens_s, step_cost, update_token_s
from verl_tlt.advise.replica import EngineSpec
from verl_tlt.advise.response_lengths import LogNormal, from_mean, from_moments
from verl_tlt.advise.run_metrics import RunMetrics
from verl_tlt.advise.simulation import SimulatedRollout, SimulatedRun, simulate
from verl_tlt.advise.step_costs import CostModel, LearnedCost, RooflineCost
from verl_tlt.advise.workload import Workload
from verl_tlt.errors import TLTError
from verl_tlt.speculation.types import OFF

SETTINGS = ("low", "likely", "high")
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
"""Relative standard deviation of acceptance between responses: a rollout waits for the response with the lowest."""
MEDIAN_SHARE, SIGMA = 1 / 10, 1.0
"""Median response over the longest allowed, and the spread of the logarithm: one response in a hundred is cut."""
OVERHEAD_S = 0.5
"""TLT's own work on the critical path of a step; the toy's steps have 0.1 to 0.4 s."""
FIXED_S = 5.0
"""Weight sync, and reward that rollout does not hide."""
SESSION_BEGINS_S = 2.1
"""From a replica's last response to the first micro-batch: it falls asleep, and the drafter moves to the device."""
LEAST_TOKENS = 8 * 1024
"""Tokens of the shortest session whose result is merged (`min_merge_steps` micro-batches)."""
ENOUGH_RESPONSES = 1024
"""Responses over which a rollout's luck evens out; a step with fewer is simulated up to four times."""


@dataclass(frozen=True)
class Scenario:
    """Everything known about a run: its recipe, what a run of it showed, and what the user says."""

    work: Workload
    shape: Shape
    gpu: Gpu
    arms: tuple[int, ...]
    """Draft lengths that the policy may choose."""
    spot: bool
    """Idle time trains the drafter."""
    has_drafter: bool
    """The recipe names a drafter to start from."""
    metrics: RunMetrics | None = None
    acceptance: tuple[float, ...] = ()
    """Given by the user; empty: measured or assumed."""
    response: float | None = None
    """Mean response in tokens, given by the user."""
    reward_s: float = 0.0
    """Seconds that reward adds to a step, given by the user."""
    seed: int = 0


@dataclass
class Estimate:
    """Simulated rollouts of a scenario by setting, and what they rest on."""

    rollouts: dict[str, SimulatedRollout] = field(default_factory=dict)
    costs: dict[str, CostModel] = field(default_factory=dict)
    acceptance: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rest_s: float = 0.0
    """Seconds of a step outside rollout."""
    overhead_s: float = OVERHEAD_S
    """TLT's own seconds on the critical path of a step."""
    session_s: float = SESSION_BEGINS_S
    """Bubble that a session needs for its result to be merged."""
    assumed: list[tuple[str, str]] = field(default_factory=list)
    """(what, value and why)."""

    def assume(self, what: str, why: str) -> None:
        """Note an assumption, once."""
        if (what, why) not in self.assumed:
            self.assumed.append((what, why))


def estimate(scenario: Scenario, assumed: Sequence[tuple[str, str]] = ()) -> Estimate:
    """Simulate rollouts of the run at every setting, with a drafter that has been trained already.

    Args:
        scenario: the run.
        assumed: what its reader had to assume; listed first.

    Raises:
        TLTError: the recipe asks for no work, or what was logged contradicts it.
    """
    work, metrics, found = scenario.work, scenario.metrics, Estimate(assumed=list(assumed))
    if work.requests < 1 or work.replicas < 1:
        raise TLTError("data.train_batch_size, trainer.nnodes and trainer.n_gpus_per_node must ask for some work.")
    lengths = _lengths(scenario, found)
    if metrics is not None and metrics.prompt_mean:
        prompt = round(metrics.prompt_mean)
    else:
        prompt = max(1, work.prompt // 4)
        found.assume("mean prompt", f"{prompt} tokens, a quarter of data.max_prompt_length")
    found.rest_s = _rest_s(scenario, lengths, found)
    if scenario.spot:
        found.session_s += LEAST_TOKENS / drafter_tokens_s(scenario.shape, scenario.gpu, work.tensor_parallel)
    if metrics is not None and metrics.overhead_s is not None:
        found.overhead_s = metrics.overhead_s
    else:
        found.assume("TLT's own work in a step", f"{OVERHEAD_S} s")
    for setting in SETTINGS:
        cost, found.acceptance[setting] = _cost(scenario, setting, found), _acceptance(scenario, setting, found)
        found.costs[setting] = cost
        prefill = cost.token_s if isinstance(cost, RooflineCost) else 0.0
        engine = EngineSpec(
            cost, usable(cost, scenario.arms), max_batch=work.max_num_seqs, prefill_token_s=prefill,
            spread=SPREAD[setting],
        )  # fmt: skip
        steps = min(4, math.ceil(ENOUGH_RESPONSES / work.requests))
        run = SimulatedRun(
            engine, work.replicas, max(work.requests, work.replicas), lengths, found.acceptance[setting], prompt,
            steps, scenario.seed,
        )  # fmt: skip
        found.rollouts[setting] = simulate(run)
    return found


def _lengths(scenario: Scenario, found: Estimate) -> LogNormal:
    """Response lengths as a run's metrics, the user, or the recipe's limit suggest them."""
    work, metrics, mean = scenario.work, scenario.metrics, scenario.response
    if metrics is not None:
        return from_moments(metrics.response_mean, metrics.response_max, metrics.clipped, work.requests, work.response)
    if mean is not None:
        found.assume("spread of lengths", f"log-normal, sigma {SIGMA}, around the mean that was given")
        if not 1 <= mean <= work.response:
            limit = f"data.max_response_length={work.response}"
            raise TLTError(f"--response-length must be between 1 and {limit}, not {mean:g}.")
        return from_mean(mean, SIGMA, work.response)
    found.assume(
        "response lengths", f"log-normal, median {work.response * MEDIAN_SHARE:.0f} (a tenth of "
        f"data.max_response_length), sigma {SIGMA}: one in a hundred is cut; --metrics or --response-length is better",
    )  # fmt: skip
    return LogNormal(work.response * MEDIAN_SHARE, SIGMA, work.response)


def _rest_s(scenario: Scenario, lengths: LogNormal, found: Estimate) -> float:
    """Seconds of a step outside rollout, measured or from the policy's size."""
    if scenario.metrics is not None:
        return scenario.metrics.rest_s
    work, fixed_s = scenario.work, FIXED_S + scenario.reward_s
    token_s = update_token_s(scenario.shape, scenario.gpu, work.gpus, work.critic, work.reference)
    found.assume(
        "outside rollout", f"log-probs and update at 30 % of the data sheet's FLOP/s on {work.gpus} GPUs, and "
        f"{fixed_s:g} s for weight sync and reward; --metrics or --reward-seconds says better",
    )  # fmt: skip
    return fixed_s + token_s * work.requests * lengths.mean()


def _cost(scenario: Scenario, setting: str, found: Estimate) -> CostModel:
    """A run's own step costs where it drafted, else the data sheet's."""
    if scenario.metrics is not None and scenario.metrics.costs.points:
        arms = scenario.metrics.costs.arms()
        if {OFF, 0} & set(arms) and arms[-1] > 0:
            return LearnedCost(scenario.metrics.costs)
        found.assume("cost of drafts", "from the data sheet: the run has not drafted")
    found.assume("step costs", "the GPU's data sheet: 90 % of its bandwidth, 40 % of its FLOP/s")
    work = scenario.work
    return step_cost(scenario.shape, scenario.gpu, work.tensor_parallel, work.eager, SHARPNESS[setting])


def _acceptance(scenario: Scenario, setting: str, found: Estimate) -> tuple[float, ...]:
    """Conditional acceptance by position, for every draft length that may be chosen."""
    known = scenario.acceptance or (scenario.metrics.acceptance if scenario.metrics else ())
    if not known:
        found.assume("acceptance", "accept length 1.95 to 3.2 at K=3, of a drafter that is trained along or made by "
                     "verl-tlt warmup; verl-tlt evaluate measures one")  # fmt: skip
    factor = AROUND_MEASURED[setting] if known else 1.0
    values, longest = known or ACCEPTANCE[setting], scenario.arms[-1]
    extended = (*values[:longest], *(values[-1] for _ in range(longest - len(values))))
    return tuple(float(np.clip(a * factor, 0.0, 1.0)) for a in extended)


def accept_length(acceptance: Sequence[float], k: int) -> float:
    """Tokens of a step that verifies k drafted tokens."""
    return float(1.0 + np.cumprod(acceptance[:k]).sum())


def usable(cost: CostModel, arms: tuple[int, ...]) -> tuple[int, ...]:
    """The draft lengths whose cost is known: a run says nothing of longer drafts than its own."""
    return tuple(k for k in arms if not isinstance(cost, LearnedCost) or k <= cost.longest)


def break_even(cost: CostModel, batch: int, arms: tuple[int, ...], context: int) -> dict[int, float]:
    """By K: the accept length above which a draft pays at this batch, with `context` tokens in each request."""
    off_s = cost.seconds(batch, batch * context, 0, OFF)
    return {k: cost.seconds(batch, batch * context, k, k) / off_s for k in usable(cost, arms) if k > 0}
