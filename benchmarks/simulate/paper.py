"""The TLT paper's cluster (arXiv 2511.16665), as far as the paper describes it, in the advisor's simulation.

One set of inputs for every row, none of them fitted to a row. What the paper gives: accept rates (Fig. 16), speed of
tree drafting by batch (Table 4) and at batch 1 for 7B (Table 2), nodes of 8 H100, drafting at 32 requests or fewer.
What it does not give is assumed, from the authors' published examples where they say it, and listed in `ASSUMED`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulate.hardware import QWEN_32B_TP4, CostModel, GraphCost, steady
from benchmarks.simulate.workload import FIG16_ADAPTIVE
from verl_tlt.advise.simulation import EngineSpec, LogNormal, SimulatedRun, decode, simulate, step_gains
from verl_tlt.speculation.types import OFF

TABLE_4 = {1: 3.62, 2: 3.39, 4: 3.13, 8: 2.73, 16: 2.67, 32: 2.48}
"""Speed over no drafting by batch, at the best verify budget (Qwen-32B, TP4)."""
THRESHOLD = 32
"""Requests in an engine at which the paper's system starts to draft."""
TABLE_3 = {("7B", 1): 1.21, ("7B", 2): 1.45, ("7B", 4): 1.62, ("7B", 8): 1.76, ("32B", 4): 1.83, ("32B", 8): 2.12}
"""Speed of a step over verl's by model and nodes."""
FIG_11 = {"7B": 1.76, "32B": 2.12, "70B": 1.86}
"""The same on 8 nodes."""
CASE_STUDY = 2.44
"""Fig. 14: rollout of 128 requests on one engine, drafting below 32."""

ASSUMED = {
    "requests": "512 a step on any number of nodes (64 prompts x 8, the authors' example for 7B)",
    "lengths": "log-normal, median 3000, sigma 1.1, cut at 30720: mean 5100, one in 60 cut; prompts of 700",
    "replicas": "TP 4 for 7B and TP 8 for 32B, as in the authors' examples; TP 8 for 70B",
    "step costs": "weights and KV read at 3.0 TB/s, 400 TFLOP/s, 1 ms a step on top",
    "rest of a step": "12 FLOP per parameter and token (two log-prob passes, update with recomputation) at 300 TFLOP/s "
    "a GPU, and 10 s for the weight sync and reward",
    "drafter": "Fig. 16's adapted one, from the first step on",
}

LENGTHS = LogNormal(3000, 1.1, 30720)
PROMPT, REQUESTS = 700, 512
FIXED_S, GPU_FLOPS = 10.0, 3.0e14
CHAIN = float(1.0 + np.cumprod(FIG16_ADAPTIVE).sum())
"""Tokens per draft of a chain of eight."""


@dataclass(frozen=True)
class Model:
    """What decides the cost of a policy."""

    parameters: float
    kv_bytes: float
    """Of one token's context."""
    tensor_parallel: int
    single: float
    """Speed of tree drafting at one request."""


MODELS = {"7B": Model(7.6e9, 57e3, 4, 2.61), "32B": Model(32.8e9, 262e3, 8, 3.62), "70B": Model(70.6e9, 328e3, 8, 3.62)}


@dataclass(frozen=True)
class TreeCost:
    """Steps in which a tree is verified, by the speed that the paper measured: one "draft length", K=8.

    A step with a tree takes as long as makes a chain of the same drafter as fast as the paper's trees were; above
    `THRESHOLD` requests it would never end, so none is chosen.
    """

    base: CostModel
    single: float

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        off = self.base.seconds(batch, kv_tokens, 0, OFF)
        if verified == 0:
            return off
        if batch > THRESHOLD:
            return math.inf
        speed = float(np.interp(batch, list(TABLE_4), list(TABLE_4.values())))
        return off * CHAIN / (1.0 + (self.single - 1.0) * (speed - 1.0) / (TABLE_4[1] - 1.0))


def decoder(model: Model) -> GraphCost:
    """Costs of a policy on H100s from its size; the drafter's passes as on one H100 (8B)."""
    t = model.tensor_parallel
    return GraphCost(
        weights_s=2 * model.parameters / 3.0e12 / t, kv_token_s=model.kv_bytes / 3.0e12 / t,
        token_s=2 * model.parameters / 4.0e14 / t, sharpness=QWEN_32B_TP4.sharpness, overhead_s=1.0e-3,
        sync_s=0.25e-3, first_s=0.20e-3, pass_s=0.45e-3, request_pass_s=0.6e-6,
    )  # fmt: skip


def theirs(cost: CostModel, single: float) -> EngineSpec:
    """Trees, at `THRESHOLD` requests and fewer."""
    return EngineSpec(steady(TreeCost(cost, single)), (0, 8))


def row(name: str, nodes: int, steps: int) -> dict[str, Any]:
    """One cluster: the paper's rule with trees, and our control with chains of up to seven."""
    model = MODELS[name]
    cost, gpus = decoder(model), 8 * nodes
    found: dict[str, Any] = {"model": name, "nodes": nodes, "replicas": gpus // model.tensor_parallel}
    for label, engine in (("theirs", theirs(cost, model.single)), ("ours", EngineSpec(steady(cost), (0, 1, 3, 7)))):
        run = SimulatedRun(engine, found["replicas"], REQUESTS, LENGTHS, FIG16_ADAPTIVE, PROMPT, steps)
        r = simulate(run)
        rest_s = FIXED_S + 12 * model.parameters / (GPU_FLOPS * gpus) * (r.tokens + REQUESTS * PROMPT)
        step = (r.stock_s + rest_s) / (r.rollout_s + rest_s)
        found[label] = {"rollout": round(r.speed, 3), "step": round(step, 3)}
        share = r.stock_s / (r.stock_s + rest_s)
        found |= {"rollout_share": round(share, 3), "share_below_32_requests": round(r.tail_share, 3)}
    return found


def case_study(steps: int) -> dict[str, float]:
    """128 requests on one engine of Table 4's."""
    spec = theirs(QWEN_32B_TP4, TABLE_4[1])
    draws = [LENGTHS.draw(np.random.default_rng([5, i]), 128) for i in range(steps)]
    base = [decode(spec, lengths, PROMPT).seconds for lengths in draws]
    ours = [decode(spec, lengths, PROMPT, step_gains(spec, FIG16_ADAPTIVE, 128)).seconds for lengths in draws]
    return {
        "paper": CASE_STUDY,
        "theirs": round(sum(base) / sum(ours), 3),
        "stock_rollout_s": round(float(np.mean(base)), 1),
    }


def reproduce(steps: int = 6) -> dict[str, Any]:
    """Table 3, Fig. 11 and the case study."""
    paper: Mapping[tuple[str, int], float] = {**TABLE_3, **{(name, 8): speed for name, speed in FIG_11.items()}}
    rows = [row(*key, steps) | {"paper_step": speed} for key, speed in paper.items()]
    return {"assumed": ASSUMED, "clusters": rows, "case_study": case_study(steps)}
