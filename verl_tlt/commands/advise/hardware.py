"""What a recipe asks for, and what that costs on an accelerator by its data sheet and the policy's shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.checks import recipe
from verl_tlt.checks.models import located
from verl_tlt.checks.recipe import ROLLOUT, number, select
from verl_tlt.config import TLTConfigError
from verl_tlt.drafter.policy import draft_vocab_size, policy_shape, read_model_config
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.speculation.costs.roofline import Roofline

if TYPE_CHECKING:
    from omegaconf import DictConfig

BYTES = 2
"""Bytes of a weight or of a number in the KV cache."""
BANDWIDTH_REACHED, FLOPS_REACHED, TRAINING_REACHED = 0.9, 0.4, 0.3
"""Shares of the data sheet that decoding and training are taken to reach."""
EAGER_S = 0.25e-3
"""Seconds that each layer adds where an engine has no CUDA graphs."""
BESIDE_BYTES = 3e9
"""Assumed bytes on each device of an engine beside weights and KV cache: context, activations, graphs, drafter."""


@dataclass(frozen=True)
class Gpu:
    bytes_s: float
    flops: float
    """Dense FLOP/s in 16 bits."""
    memory: float


GPUS = {
    "A100": Gpu(2.0e12, 312e12, 80e9),
    "H20": Gpu(4.0e12, 148e12, 96e9),
    "H100": Gpu(3.35e12, 989e12, 80e9),
    "H200": Gpu(4.8e12, 989e12, 141e9),
    "L40S": Gpu(0.86e12, 362e12, 48e9),
    "B200": Gpu(8.0e12, 2250e12, 180e9),
}
"""Accelerators by the name that `--gpu` takes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a policy that decide what its steps cost: parameters, and those that a token uses (`active`)."""

    parameters: float
    active: float
    layers: int
    kv_bytes: float
    """Bytes of KV cache per token of context."""
    head: float
    """Parameters of a new drafter's output head, which has a part of a large vocabulary."""


KNOWN = (
    Shape(0.6e9, 0.6e9, 28, 115e3, 0.03e9),
    Shape(1.7e9, 1.7e9, 28, 115e3, 0.07e9),
    Shape(4.0e9, 4.0e9, 36, 147e3, 0.08e9),
    Shape(7.6e9, 7.6e9, 28, 57e3, 0.12e9),
    Shape(8.2e9, 8.2e9, 36, 147e3, 0.13e9),
    Shape(14.8e9, 14.8e9, 40, 164e3, 0.17e9),
    Shape(30.5e9, 3.3e9, 48, 98e3, 0.07e9),
    Shape(32.8e9, 32.8e9, 64, 262e3, 0.17e9),
    Shape(70.6e9, 70.6e9, 80, 328e3, 0.27e9),
    Shape(235e9, 22e9, 94, 193e3, 0.13e9),
)
"""Qwen and Llama policies. A policy known by name alone is taken for the nearest in size, a mixture for a mixture."""


def find_shape(policy: str) -> tuple[Shape, str]:
    """(shape, where it is from): the policy's config on this disk, else the size in its name; else a `TLTError`."""
    try:
        known = policy_shape(read_model_config(located(policy), fetch=False))
        kv_bytes = 2 * known.num_layers * known.num_kv_heads * known.head_dim * BYTES
        head = known.hidden_size * draft_vocab_size(None, known.vocab_size, "")
        return Shape(*known.parameters, known.num_layers, kv_bytes, head), "its config.json"
    except DrafterError:
        pass  # not on this disk, or of another kind: its name may tell
    sized = re.search(r"(\d+(?:\.\d+)?)[bB](?:-[aA](\d+(?:\.\d+)?)[bB])?(?![a-zA-Z])", Path(policy).name)
    if sized is None or float(sized[1]) == 0.0:
        raise TLTError(
            f"actor_rollout_ref.model.path={policy} is not on this disk and its name does not tell its size; "
            "say it with --parameters, in billions."
        )
    return shape_of_size(float(sized[1]) * 1e9, float(sized[2]) * 1e9 if sized[2] else None), "the size in its name"


def shape_of_size(parameters: float, active: float | None = None) -> Shape:
    """The known shape nearest in size, with this many parameters, of which a token of a mixture uses `active`."""
    candidates = [s for s in KNOWN if (s.active < s.parameters) == (active is not None)]
    nearest = min(candidates, key=lambda s: abs(s.parameters / parameters - 1.0))
    return Shape(parameters, active or parameters, nearest.layers, nearest.kv_bytes, nearest.head)


@dataclass(frozen=True)
class StepGuess:
    """What a data sheet does not say of an engine's steps."""

    sharpness: float
    """The roofline's p."""
    layer_s: float
    """Seconds that each layer adds to reading its weights: launches, small kernels, communication among devices."""
    pass_s: float
    """Seconds of a drafter's pass apart from reading its weights."""


def step_cost(shape: Shape, gpu: Gpu, devices: int, eager: bool, guess: StepGuess) -> Roofline:
    reads, computes = gpu.bytes_s * BANDWIDTH_REACHED * devices, gpu.flops * FLOPS_REACHED * devices
    layer_s, head_s = BYTES * shape.active / shape.layers / reads, BYTES * shape.head / reads
    coefficients = (
        shape.layers * (guess.layer_s + (EAGER_S if eager else 0.0)),
        BYTES * shape.parameters / reads,
        shape.kv_bytes / reads,
        token_s(shape, gpu, devices),
        guess.pass_s + layer_s,
        head_s,
        guess.pass_s + layer_s + head_s,
        2 * (shape.active / shape.layers + shape.head) / computes,
        guess.sharpness,
    )
    return Roofline.known(coefficients, min(1.0, shape.active / shape.parameters))


def token_s(shape: Shape, gpu: Gpu, devices: int) -> float:
    return 2 * shape.active / (gpu.flops * FLOPS_REACHED * devices)


# ---------------------------------------------------------------------- a recipe


@dataclass(frozen=True)
class Workload:
    """The numbers of a recipe that decide how long a step takes."""

    policy: str
    """`actor_rollout_ref.model.path`, as it is written."""
    mode: str
    gpus: int
    """GPUs of the trainer."""
    replicas: int
    tensor_parallel: int
    requests: int
    """Responses of a step: prompts times samples."""
    prompt: int
    """Longest prompt, in tokens."""
    response: int
    """Longest response, in tokens."""
    max_num_seqs: int
    memory_utilization: float
    """Share of a device's memory that an engine takes."""
    eager: bool
    critic: bool
    reference: bool
    """A reference policy's log-probs are computed too."""


def read_workload(config: DictConfig) -> Workload:
    """Look up what decides how long a step takes; raises `TLTConfigError` where a key cannot be read."""
    mode = recipe.trainer_mode(config)
    kl_terms = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    return Workload(
        policy=str(select(config, "actor_rollout_ref.model.path", "")),
        mode=mode,
        gpus=recipe.devices(config, "trainer"),
        replicas=recipe.replicas_on(config, ROLLOUT if mode == "separate_async" else "trainer"),
        tensor_parallel=recipe.devices_per_replica(config),
        requests=max(1, number(config, "data.train_batch_size", 0) * number(config, f"{ROLLOUT}.n", 1)),
        prompt=number(config, "data.max_prompt_length", 512),
        response=number(config, "data.max_response_length", 512),
        max_num_seqs=max(1, recipe.most_requests(config)),
        memory_utilization=_share(config, f"{ROLLOUT}.gpu_memory_utilization", 0.5),
        eager=recipe.enforce_eager(config),
        critic=str(select(config, "algorithm.adv_estimator", "")) == "gae",
        reference=any(bool(select(config, key, False)) for key in kl_terms),
    )


def _share(config: DictConfig, key: str, default: float) -> float:
    """The number above 0 and up to 1 at a dotted key."""
    value = select(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise TLTConfigError(f"{key} must be above 0 and at most 1, not {value!r}.")
    return float(value)


def kv_capacity(work: Workload, shape: Shape, gpu: Gpu) -> int:
    """Tokens of context that one engine's KV cache holds, with the drafter's layer; 0: not even the weights fit."""
    usable = work.tensor_parallel * (work.memory_utilization * gpu.memory - BESIDE_BYTES) - BYTES * shape.parameters
    return max(0, int(usable / (shape.kv_bytes * (1.0 + 1.0 / shape.layers))))
