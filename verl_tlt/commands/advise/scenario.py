"""What a run would do: from its recipe, and what a run of it showed, to simulated rollouts at three settings.

The settings are the likely one and both ends of the range. They differ in what is known least: how often drafts are
accepted, and what an engine step and a drafter's pass take beyond reading their weights. What neither recipe nor run
says is assumed, and every assumption is listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from verl_tlt.commands.advise import hardware, simulation
from verl_tlt.commands.advise.judge import Numbers
from verl_tlt.commands.advise.run_metrics import RunMetrics
from verl_tlt.errors import TLTError
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

BATCHES = (1, 8, 32, 128)
"""At which the break-even accept length is shown."""


@dataclass(frozen=True)
class Setting:
    """One guess at what is known least."""

    acceptance: tuple[float, ...]
    """Conditional acceptance by position of a drafter that is trained along."""
    around_measured: float
    """Factor on an acceptance that a run showed: policy and drafter go on changing."""
    step: hardware.StepGuess
    spread: float
    """Relative standard deviation of acceptance between responses: a rollout waits for the one with the lowest."""


SETTINGS = {
    "low": Setting((0.55, 0.50, 0.46, 0.43, 0.40, 0.38, 0.36), 0.9, hardware.StepGuess(1.065, 0.03e-3, 0.5e-3), 0.15),
    "likely": Setting((0.72, 0.67, 0.63, 0.60, 0.57, 0.55, 0.53), 1.0, hardware.StepGuess(2.0, 0.06e-3, 0.3e-3), 0.1),
    "high": Setting((0.88, 0.83, 0.79, 0.75, 0.72, 0.70, 0.68), 1.05, hardware.StepGuess(4.0, 0.1e-3, 0.1e-3), 0.0),
}
"""Accept lengths of 1.95, 2.5 and 3.2 at K=3: the TLT paper's adapted drafter is at 3.5 (Fig. 16), the one that this
project's toy ends with at 2.0 to 2.9. The lowest sharpness, and a pass of 0.4 ms, are what the paper's Table 4 fits.
Seconds per layer hold the decoding of one request that others measured on GPUs (test_step_costs.py)."""
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

    work: hardware.Workload
    shape: hardware.Shape
    gpu: hardware.Gpu
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


@dataclass(frozen=True)
class Estimate:
    """What decides in a scenario, and from which accept length on drafts pay in it."""

    numbers: Numbers
    context: int
    """Tokens of context of a request in the tail: a mean response, and its prompt."""
    break_even: Mapping[int, Mapping[int, float]]
    """By batch and K: the accept length above which a draft pays."""
    kv_tokens: int
    """Tokens of context that an engine's KV cache holds."""
    assumed: Mapping[str, str]
    """What neither recipe nor run nor user says: what is taken for it, and why."""


def estimate(scenario: Scenario) -> Estimate:
    """Simulate rollouts at every setting, with a drafter that has been trained already; `TLTError` without work."""
    work, metrics = scenario.work, scenario.metrics
    if min(work.requests, work.replicas, work.response) < 1:
        keys = "data.train_batch_size, data.max_response_length, trainer.nnodes and trainer.n_gpus_per_node"
        raise TLTError(f"{keys} must ask for some work.")
    if not (kv_tokens := hardware.kv_capacity(work, scenario.shape, scenario.gpu)):
        size = f"{scenario.shape.parameters / 1e9:.1f}B parameters leave no room for a KV cache"
        key = "actor_rollout_ref.rollout.gpu_memory_utilization"
        raise TLTError(f"{size} on {work.tensor_parallel} such GPUs at {key}={work.memory_utilization:g}.")
    prompt = round(metrics.prompt_mean) if metrics and metrics.prompt_mean else max(1, work.prompt // 4)
    steps = min(4, math.ceil(ENOUGH_RESPONSES / work.requests))
    lengths, assumed_lengths = _lengths(scenario)
    engines, assumed_costs = _engines(scenario, kv_tokens)
    acceptance = {name: _acceptance(scenario, setting) for name, setting in SETTINGS.items()}
    requests = max(work.requests, work.replicas)
    rollouts = {
        name: simulation.simulate(engine, work.replicas, requests, lengths, acceptance[name], prompt, steps)
        for name, engine in engines.items()
    }
    context = round(rollouts["likely"].tokens / work.requests) + work.prompt // 4
    batches = [b for b in BATCHES if b <= max(work.max_num_seqs, 8)]
    even = {batch: break_even(engines["likely"], batch, context) for batch in batches}
    rest_s, overhead_s, assumed_rest = _outside_rollout(scenario, lengths)
    assumed = {
        "KV cache": f"what the weights and {hardware.BESIDE_BYTES / 1e9:g} GB a GPU for all else leave"
    } | assumed_lengths
    if not (metrics and metrics.prompt_mean):
        assumed["mean prompt"] = f"{prompt} tokens, a quarter of data.max_prompt_length"
    assumed |= assumed_costs
    known, longest = _known_acceptance(scenario), scenario.arms[-1]
    if known and len(known) < longest:
        assumed[f"acceptance beyond position {len(known)}"] = (
            f"{known[-1]:.2f} as there, up to position {longest}; --acceptance takes one number for each"
        )
    if not known:
        assumed["acceptance"] = (
            "accept length 1.95 to 3.2 at K=3, of a drafter that is trained along or made by verl-tlt warmup; "
            "verl-tlt evaluate measures one"
        )
    numbers = _numbers(scenario, rollouts, acceptance, even[8], rest_s, overhead_s)
    return Estimate(numbers, context, even, kv_tokens, assumed | assumed_rest)


def _numbers(
    scenario: Scenario,
    rollouts: Mapping[str, simulation.SimulatedRollout],
    acceptance: Mapping[str, tuple[float, ...]],
    tail_break_even: Mapping[int, float],
    rest_s: float,
    overhead_s: float,
) -> Numbers:
    """What decides: measured where the run showed it, simulated elsewhere."""
    work, metrics, likely = scenario.work, scenario.metrics, rollouts["likely"]
    k = max(k for k in tail_break_even if k <= max(3, min(tail_break_even)))
    session_s = SESSION_BEGINS_S
    if scenario.spot:
        session_s += LEAST_TOKENS / hardware.drafter_tokens_s(scenario.shape, scenario.gpu, work.tensor_parallel)
    # A few simulated steps have luck of their own, by which a worse drafter may come out ahead.
    speeds = [rollout.speed for rollout in rollouts.values()]
    numbers = Numbers(
        gen_s=likely.stock_s,
        rest_s=rest_s,
        overhead_s=overhead_s,
        rollout={"low": min(speeds), "likely": likely.speed, "high": max(speeds)},
        tail_share=likely.tail_share,
        bubble_s=likely.bubble_share * likely.stock_s,
        bubble_needed_s=session_s,
        replicas=work.replicas,
        has_drafter=scenario.has_drafter or bool(scenario.acceptance),
        trains=scenario.spot,
        mode=work.mode,
        response_mean=likely.tokens / work.requests,
        tail_break_even=tail_break_even[k],
        accept_known=bool(_known_acceptance(scenario)),
        accept={name: expected_accept_lengths(acceptance[name], k)[k] for name in SETTINGS},
        measured=metrics is not None,
    )
    return numbers if metrics is None else _as_measured(numbers, work, metrics)


def _as_measured(n: Numbers, work: hardware.Workload, metrics: RunMetrics) -> Numbers:
    """The numbers with what a run showed in place of what was simulated."""
    gen_s, tail, waiting = metrics.stock_gen_s, n.tail_share, metrics.tool_share or 0.0
    bubble_s = n.bubble_s / n.gen_s * gen_s if metrics.bubble_s is None else metrics.bubble_s / work.replicas
    if metrics.seconds_by_batch:
        tail = simulation.tail_share([metrics.seconds_by_batch])
    if work.multi_turn and metrics.tool_share is None and metrics.busy_share is not None:
        waiting = 1.0 - metrics.busy_share  # verl's v1 trainer does not log how long tools take
    return replace(
        n, gen_s=gen_s, tail_share=tail, bubble_s=bubble_s, tool_share=waiting,
        reward_s=metrics.reward_s or 0.0,
        has_drafter=n.has_drafter or (metrics.accept_length or 0.0) > 1.2,
    )  # fmt: skip


def _lengths(scenario: Scenario) -> tuple[simulation.LogNormal, dict[str, str]]:
    """Response lengths as a run's metrics, the user, or the recipe's limit suggest them; and what is assumed."""
    work, metrics, mean = scenario.work, scenario.metrics, scenario.response
    if metrics is not None:
        # verl's share of clipped responses is of those as long as the step's longest, whether the limit cut it or not.
        clipped = metrics.clipped if metrics.longest >= work.response else 0.0
        return simulation.from_moments(
            metrics.response_mean, metrics.response_max, clipped, work.requests, work.response
        ), {}
    if mean is not None:
        if not 1 <= mean <= work.response:
            limit = f"data.max_response_length={work.response}"
            raise TLTError(f"--response-length must be between 1 and {limit}, not {mean:g}.")
        return simulation.from_mean(mean, SIGMA, work.response), {"spread of lengths": f"log-normal, sigma {SIGMA}"}
    median = work.response * MEDIAN_SHARE
    shape = (
        f"log-normal, median {median:.0f} (a tenth of data.max_response_length), sigma {SIGMA}: one in a hundred is "
        "cut; --metrics or --response-length is better"
    )
    return simulation.LogNormal(median, SIGMA, work.response), {"response lengths": shape}


def _outside_rollout(scenario: Scenario, lengths: simulation.LogNormal) -> tuple[float, float, dict[str, str]]:
    """Seconds of a step outside rollout, measured or by the policy's size; TLT's own work in it; assumptions."""
    work, metrics = scenario.work, scenario.metrics
    if metrics is not None and metrics.overhead_s is not None:
        return metrics.rest_s, metrics.overhead_s, {}
    assumed = {"TLT's own work in a step": f"{OVERHEAD_S} s"}
    if metrics is not None:
        return metrics.rest_s, OVERHEAD_S, assumed
    update_s = hardware.update_token_s(scenario.shape, scenario.gpu, work.gpus, work.critic, work.reference)
    assumed["outside rollout"] = (
        f"log-probs and update at 30 % of the data sheet's FLOP/s on {work.gpus} GPUs, and {FIXED_S:g} s for weight "
        "sync and reward; --metrics says better"
    )
    return FIXED_S + update_s * work.requests * lengths.mean(), OVERHEAD_S, assumed


def _engines(scenario: Scenario, kv_tokens: int) -> tuple[dict[str, simulation.EngineSpec], dict[str, str]]:
    """An engine by setting, and what is assumed of its costs.

    It has a run's own step costs where the run drafted, which know no longer drafts; else the data sheet's.
    """
    work, shape, arms = scenario.work, scenario.shape, scenario.arms
    costs = scenario.metrics.costs if scenario.metrics is not None else LatencyTable()
    assumed = {}
    if measured := costs.lengths():
        longest = measured[-1]
        if measured[0] <= 0 and longest >= arms[1]:
            seconds = LatencyModel(range(longest + 1), table=costs, active_share=shape.active_share).seconds
            known = tuple(k for k in arms if k <= longest)
            spec = simulation.EngineSpec(seconds, known, work.max_num_seqs, kv_tokens)
            return {name: replace(spec, spread=setting.spread) for name, setting in SETTINGS.items()}, {}
        assumed["cost of drafts"] = "from the data sheet: the run has not drafted so"
    layer, drafting = (
        sorted(1e3 * getattr(setting.step, name) for setting in SETTINGS.values()) for name in ("layer_s", "pass_s")
    )
    assumed["step costs"] = (
        f"the GPU's data sheet: 90 % of its bandwidth, 40 % of its FLOP/s; besides {layer[1]:g} ms ({layer[0]:g} to "
        f"{layer[2]:g}) a layer, and {drafting[1]:g} ms ({drafting[0]:g} to {drafting[2]:g}) a pass of the drafter"
    )
    prefill_s, engines = hardware.token_s(shape, scenario.gpu, work.tensor_parallel), {}
    for name, setting in SETTINGS.items():
        sheet = hardware.step_cost(shape, scenario.gpu, work.tensor_parallel, work.eager, setting.step)
        engines[name] = simulation.EngineSpec(
            sheet.seconds, arms, work.max_num_seqs, kv_tokens, prefill_s, setting.spread
        )
    return engines, assumed


def _known_acceptance(scenario: Scenario) -> tuple[float, ...]:
    return scenario.acceptance or (scenario.metrics.acceptance if scenario.metrics else ())


def _acceptance(scenario: Scenario, setting: Setting) -> tuple[float, ...]:
    """Conditional acceptance by position, for every draft length that may be chosen."""
    known = _known_acceptance(scenario)
    factor = setting.around_measured if known else 1.0
    values, longest = known or setting.acceptance, scenario.arms[-1]
    extended = (*values[:longest], *(values[-1] for _ in range(longest - len(values))))
    return tuple(float(np.clip(a * factor, 0.0, 1.0)) for a in extended)


def break_even(engine: simulation.EngineSpec, batch: int, context: int) -> dict[int, float]:
    """By K: the accept length above which a draft pays at this batch, with `context` tokens in each request."""
    off_s = engine.step_seconds(batch, batch * context, OFF)
    return {k: engine.step_seconds(batch, batch * context, k) / off_s for k in engine.arms if k > 0}
