"""Estimates what a run would do: simulated rollouts at three settings, from its recipe and the metrics of a run.

The settings are the likely one and both ends of the range. They differ in what is known least: how often drafts are
accepted, and what an engine step and a drafter's pass take beyond reading their weights. What neither recipe nor run
says is assumed, and every assumption is listed.
"""

import math
from dataclasses import dataclass

import numpy as np

from verl_tlt.checks.recipe import ROLLOUT
from verl_tlt.commands.advise import hardware, simulation
from verl_tlt.commands.advise.judge import Numbers
from verl_tlt.commands.advise.run_metrics import RunMetrics
from verl_tlt.errors import TLTError
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.types import OFF

BATCHES = (1, 8, 32, 128)
"""Batches at which the break-even accept length is shown."""


@dataclass(frozen=True)
class Setting:
    """One guess at what is known least."""

    acceptance: tuple[float, ...]
    """Conditional acceptance by position of a drafter that is trained along."""
    around_given: float
    """Factor on an acceptance that the user gives: policy and drafter go on changing."""
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
Seconds per layer hold the decoding of one request that others measured on GPUs (test_hardware.py)."""
MEDIAN_SHARE, SIGMA = 1 / 10, 1.0
"""Median response over the longest allowed, and the spread of the logarithm: one response in a hundred is cut."""
OVERHEAD_S = 0.5
"""Seconds of TLT's own work on the critical path of a step; the toy's steps have 0.1 to 0.4 s."""
FIXED_S = 5.0
"""Seconds of a step for weight sync, and for reward that rollout does not hide."""
SESSION_BEGINS_S = 2.1
"""Seconds from a replica's last response to the first micro-batch: sleep, and moving the drafter to the device."""
LEAST_TOKENS = 8 * 1024
"""Tokens of the shortest session whose result is merged (`min_merge_steps` micro-batches)."""
MOST_REQUESTS = 1 << 22
"""Most responses of a step, and most replicas, that are simulated: their lengths fill some 100 MB."""
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
    """Whether idle time trains the drafter."""
    has_drafter: bool
    """Whether the recipe names a drafter to start from, or the policy's own head."""
    metrics: RunMetrics | None = None
    acceptance: tuple[float, ...] = ()
    """Conditional acceptance by position, given by the user; empty: assumed."""
    response: float | None = None
    """Mean response in tokens, given by the user."""

    @property
    def prompt(self) -> int:
        run = self.metrics
        return round(run.prompt_mean) if run and run.prompt_mean else max(1, self.work.prompt // 4)


def estimate(scenario: Scenario) -> Numbers:
    """Simulate rollouts at every setting, with a drafter that has been trained already; `TLTError` without work."""
    work, run = scenario.work, scenario.metrics
    kv_tokens, lengths = _kv_tokens(scenario), _lengths(scenario)
    engine, rollouts = _simulated(scenario, kv_tokens, lengths)
    likely, speeds = rollouts["likely"], [rollout.speed for rollout in rollouts.values()]
    context = round(likely.tokens / work.requests) + scenario.prompt
    even = {batch: break_even(engine, batch, context) for batch in BATCHES if batch <= max(work.max_num_seqs, 8)}
    k = max(k for k in even[8] if k <= max(3, min(even[8])))
    gen_s, rest_s = (run.gen_s, run.rest_s) if run else (likely.stock_s, _rest_s(scenario, lengths.mean()))
    return Numbers(
        gen_s=gen_s,
        rest_s=rest_s,
        overhead_s=OVERHEAD_S,
        # A few simulated steps have luck of their own, by which a worse drafter may come out ahead.
        rollout={"low": min(speeds), "likely": likely.speed, "high": max(speeds)},
        tail_share=likely.tail_share,
        bubble_s=likely.bubble_share * gen_s,
        bubble_needed_s=_session_s(scenario),
        replicas=work.replicas,
        has_drafter=scenario.has_drafter or bool(scenario.acceptance),
        trains=scenario.spot,
        mode=work.mode,
        response_mean=likely.tokens / work.requests,
        tail_break_even=even[8][k],
        accept_known=bool(scenario.acceptance),
        accept={name: expected_accept_lengths(_acceptance(scenario, guess), k)[k] for name, guess in SETTINGS.items()},
        measured=run is not None,
        reward_s=(run and run.reward_s) or 0.0,
        tool_share=(run and run.tool_share) or 0.0,
        context=context,
        break_even=even,
        kv_tokens=kv_tokens,
        assumed=_assumed(scenario),
    )


def _kv_tokens(scenario: Scenario) -> int:
    """Tokens of context that an engine's KV cache holds; `TLTError` where it holds none, or there is no work."""
    work = scenario.work
    if min(work.requests, work.replicas, work.response) < 1:
        keys = "data.train_batch_size, data.max_response_length, trainer.nnodes and trainer.n_gpus_per_node"
        raise TLTError(f"{keys} must ask for some work.")
    if max(work.requests, work.replicas) > MOST_REQUESTS:
        what = f"{work.requests:,} responses on {work.replicas:,} replicas"
        raise TLTError(f"data.train_batch_size, {ROLLOUT}.n and trainer.nnodes ask for {what}: too many to simulate.")
    if tokens := hardware.kv_capacity(work, scenario.shape, scenario.gpu):
        return tokens
    size = f"{scenario.shape.parameters / 1e9:.1f}B parameters leave no room for a KV cache"
    share = f"{ROLLOUT}.gpu_memory_utilization={work.memory_utilization:g}"
    raise TLTError(f"{size} on {work.tensor_parallel} such GPUs at {share}.")


def _rest_s(scenario: Scenario, response_mean: float) -> float:
    """Seconds of a step outside rollout: log-probs, and the update with recomputation (8 FLOP) besides `FIXED_S`."""
    work = scenario.work
    passes = 2 + 8 + (2 if work.reference else 0) + (10 if work.critic else 0)  # FLOP for each parameter and token
    flops = scenario.gpu.flops * hardware.TRAINING_REACHED * work.gpus
    return FIXED_S + passes * scenario.shape.active / flops * work.requests * response_mean


def _session_s(scenario: Scenario) -> float:
    """Seconds of the shortest session whose result is merged."""
    shape = scenario.shape
    token_flop = 3 * 6 * (shape.active / shape.layers + shape.head)  # of three unrolled positions
    flops = scenario.gpu.flops * hardware.TRAINING_REACHED * scenario.work.tensor_parallel
    return SESSION_BEGINS_S + LEAST_TOKENS * token_flop / flops


def _simulated(
    scenario: Scenario, kv_tokens: int, lengths: simulation.LogNormal
) -> tuple[simulation.EngineSpec, dict[str, simulation.SimulatedRollout]]:
    """The likely engine, and rollouts by setting."""
    work, shape, gpu = scenario.work, scenario.shape, scenario.gpu
    steps, requests = min(4, math.ceil(ENOUGH_RESPONSES / work.requests)), max(work.requests, work.replicas)
    prefill_s = hardware.token_s(shape, gpu, work.tensor_parallel)
    engines, rollouts = {}, {}
    for name, setting in SETTINGS.items():
        seconds = hardware.step_cost(shape, gpu, work.tensor_parallel, work.eager, setting.step).seconds
        engines[name] = simulation.EngineSpec(
            seconds, scenario.arms, work.max_num_seqs, kv_tokens, prefill_s, setting.spread
        )
        rollouts[name] = simulation.simulate(
            engines[name], work.replicas, requests, lengths, _acceptance(scenario, setting), scenario.prompt, steps
        )
    return engines["likely"], rollouts


def _lengths(scenario: Scenario) -> simulation.LogNormal:
    """Response lengths as a run's metrics, the user, or the recipe's limit suggest them."""
    work, run, mean = scenario.work, scenario.metrics, scenario.response
    if run is not None:
        # verl's share of clipped responses is of those as long as the step's longest, whether the limit cut it or not.
        clipped = run.clipped if run.longest >= work.response else 0.0
        return simulation.from_moments(run.response_mean, run.response_max, clipped, work.requests, work.response)
    if mean is None:
        return simulation.LogNormal(work.response * MEDIAN_SHARE, SIGMA, work.response)
    if not 1 <= mean <= work.response:
        limit = f"data.max_response_length={work.response}"
        raise TLTError(f"--response-length must be between 1 and {limit}, not {mean:g}.")
    return simulation.from_mean(mean, SIGMA, work.response)


def _assumed(scenario: Scenario) -> dict[str, str]:
    """What `estimate` assumes where neither recipe nor run nor user says it: value and why."""
    work, run, known, longest = scenario.work, scenario.metrics, scenario.acceptance, scenario.arms[-1]
    assumed = {"KV cache": f"what the weights and {hardware.BESIDE_BYTES / 1e9:g} GB a GPU for all else leave"}
    if run is None and scenario.response is not None:
        assumed["spread of lengths"] = f"log-normal, sigma {SIGMA}"
    elif run is None:
        assumed["response lengths"] = (
            f"log-normal, median {work.response * MEDIAN_SHARE:.0f} (a tenth of data.max_response_length), sigma "
            f"{SIGMA}: one in a hundred is cut; --metrics or --response-length is better"
        )
    if run is None or not run.prompt_mean:
        assumed["mean prompt"] = f"{scenario.prompt} tokens, a quarter of data.max_prompt_length"
    layer, drafting = (
        sorted(1e3 * getattr(setting.step, name) for setting in SETTINGS.values()) for name in ("layer_s", "pass_s")
    )
    assumed["step costs"] = (
        f"the GPU's data sheet: 90 % of its bandwidth, 40 % of its FLOP/s; besides {layer[1]:g} ms ({layer[0]:g} to "
        f"{layer[2]:g}) a layer, and {drafting[1]:g} ms ({drafting[0]:g} to {drafting[2]:g}) a pass of the drafter"
    )
    if not known:
        assumed["acceptance"] = (
            "accept length 1.95 to 3.2 at K=3, of a drafter that is trained along or made by verl-tlt warmup; "
            "verl-tlt evaluate measures one"
        )
    elif len(known) < longest:
        assumed[f"acceptance beyond position {len(known)}"] = (
            f"{known[-1]:.2f} as there, up to position {longest}; --acceptance takes one number for each"
        )
    assumed["TLT's own work in a step"] = f"{OVERHEAD_S} s"
    if run is None:
        assumed["outside rollout"] = (
            f"log-probs and update at 30 % of the data sheet's FLOP/s on {work.gpus} GPUs, and {FIXED_S:g} s for "
            "weight sync and reward; --metrics says better"
        )
    return assumed


def _acceptance(scenario: Scenario, setting: Setting) -> tuple[float, ...]:
    """Conditional acceptance by position, for every draft length that may be chosen."""
    factor = setting.around_given if scenario.acceptance else 1.0
    values, longest = scenario.acceptance or setting.acceptance, scenario.arms[-1]
    extended = (*values[:longest], *(values[-1] for _ in range(longest - len(values))))
    return tuple(float(np.clip(a * factor, 0.0, 1.0)) for a in extended)


def break_even(engine: simulation.EngineSpec, batch: int, context: int) -> dict[int, float]:
    """By K: the accept length above which a draft pays at this batch, with `context` tokens in each request."""
    off_s = engine.step_seconds(batch, batch * context, OFF)
    return {k: engine.step_seconds(batch, batch * context, k) / off_s for k in engine.arms if k > 0}
