"""Costs on an accelerator that was not measured, from its data sheet and the policy's shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from verl_tlt.drafter.policy import PolicyShape, draft_vocab_size, policy_shape, read_model_config
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.speculation.costs.roofline import weights_read
from verl_tlt.speculation.types import OFF

BYTES = 2
"""Bytes of a weight or of a number in the KV cache."""
BANDWIDTH_REACHED, FLOPS_REACHED, TRAINING_REACHED = 0.9, 0.4, 0.3
"""Shares of the data sheet that decoding and training are taken to reach."""
LAUNCH_S, PARALLEL_S, EAGER_S = 0.6e-3, 0.4e-3, 8e-3
"""Seconds that each step adds: scheduling and sampling; communication among devices; launches without graphs."""
DRAFT_LAUNCH_S = 0.1e-3
"""Seconds of a drafter's pass apart from reading its weights."""


@dataclass(frozen=True)
class Gpu:
    """An accelerator's data sheet."""

    bytes_s: float
    """Bytes a second from memory."""
    flops: float
    """Dense FLOP/s in 16 bits."""
    memory: float
    """Bytes of memory."""


GPUS = {
    "A100": Gpu(2.0e12, 312e12, 80e9),
    "H20": Gpu(4.0e12, 148e12, 96e9),
    "H100": Gpu(3.35e12, 989e12, 80e9),
    "H200": Gpu(4.8e12, 989e12, 141e9),
    "L40S": Gpu(0.86e12, 362e12, 48e9),
    "B200": Gpu(8.0e12, 2250e12, 180e9),
}
"""By the name that `--gpu` takes."""


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

    @property
    def active_share(self) -> float:
        """Share of the parameters that one token uses."""
        return min(1.0, self.active / self.parameters)


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
"""Qwen and Llama policies; one known by its name alone is like the nearest in size, a mixture like a mixture."""


def find_shape(policy: str) -> tuple[Shape, str]:
    """(shape, where it is from): the policy's config on this disk, else the size in its name; else a `TLTError`."""
    try:
        return shape_of(policy_shape(read_model_config(policy, fetch=False))), "its config.json"
    except DrafterError:
        pass  # not on this disk, or of another kind: its name may tell
    sized = re.search(r"(\d+(?:\.\d+)?)[bB](?:-[aA](\d+(?:\.\d+)?)[bB])?(?![a-zA-Z])", Path(policy).name)
    if sized is None:
        raise TLTError(
            f"actor_rollout_ref.model.path={policy} is not on this disk and its name does not tell its size; "
            "say it with --parameters, in billions."
        )
    return shape_of_size(float(sized[1]) * 1e9, float(sized[2]) * 1e9 if sized[2] else None), "the size in its name"


def shape_of_size(parameters: float, active: float | None = None) -> Shape:
    """The known shape nearest in size, with this many parameters, of which a mixture's token uses those `active`."""
    alike = [s for s in KNOWN if (s.active < s.parameters) == (active is not None)]
    near = min(alike, key=lambda s: abs(s.parameters / parameters - 1.0))
    return Shape(parameters, active or parameters, near.layers, near.kv_bytes, near.head)


def shape_of(policy: PolicyShape) -> Shape:
    """The sizes of a policy whose config is known."""
    head = policy.hidden_size * draft_vocab_size(None, policy.vocab_size, "")
    kv_bytes = 2 * policy.num_layers * policy.num_kv_heads * policy.head_dim * BYTES
    return Shape(*policy.parameters, policy.num_layers, kv_bytes, head)


@dataclass(frozen=True)
class RooflineCost:
    """Step costs of a decoder from known coefficients; the shape is that which `speculation.costs.roofline` fits.

    A step reads weights and KV cache or computes over the verified tokens, whichever takes longer; then it drafts.
    """

    weights_s: float
    """Reading all weights once."""
    kv_token_s: float
    """Reading one token of KV cache."""
    token_s: float
    """Computing one token."""
    sharpness: float
    """Exponent of the smooth maximum: 1 adds memory and compute time, a large one takes the larger."""
    overhead_s: float
    """Scheduling, launches and sampling of a step."""
    sync_s: float
    """The drafter's pass that keeps its KV cache in step with the policy's: paid at K=0, not at OFF."""
    first_s: float
    """The LM head, which turns that pass into the first draft token."""
    pass_s: float
    """Each further draft token."""
    request_pass_s: float
    """Each request's part of a drafter's pass."""
    active_share: float = 1.0
    """Share of the weights that one token uses: below 1 in a mixture of experts, whose tokens use different ones."""

    def step_s(self, batch: int, kv_tokens: int, draft_length: int) -> float:
        """Seconds of a step that verifies a draft of this length and drafts as many tokens again; OFF: no drafter."""
        return self.verify_s(batch, kv_tokens, 1 + max(draft_length, 0)) + self.draft_s(batch, draft_length)

    def verify_s(self, batch: int, kv_tokens: int, tokens: int) -> float:
        """Seconds of the target's pass over `tokens` tokens per request."""
        return self.overhead_s + self.pass_over(batch * tokens, batch * tokens, kv_tokens)

    def pass_over(self, tokens: int, computed: int, kv_tokens: int) -> float:
        """Seconds of reading KV cache and the weights that `tokens` tokens use, and of computing `computed` tokens."""
        memory = self.weights_s * weights_read(self.active_share, tokens) + self.kv_token_s * kv_tokens
        return float((memory**self.sharpness + (self.token_s * computed) ** self.sharpness) ** (1.0 / self.sharpness))

    def draft_s(self, batch: int, drafted: int) -> float:
        """Seconds of the drafter's passes for `drafted` tokens per request."""
        if drafted == OFF:
            return 0.0
        further = self.pass_s * (drafted - 1) + self.first_s if drafted > 0 else 0.0
        return self.sync_s + further + self.request_pass_s * batch * max(drafted, 1)


def step_cost(shape: Shape, gpu: Gpu, devices: int, eager: bool, sharpness: float) -> RooflineCost:
    """Costs of an engine over so many devices; `sharpness` as in `RooflineCost`."""
    reads, computes = gpu.bytes_s * BANDWIDTH_REACHED * devices, gpu.flops * FLOPS_REACHED * devices
    layer_s, head_s = BYTES * shape.active / shape.layers / reads, BYTES * shape.head / reads
    return RooflineCost(
        weights_s=BYTES * shape.parameters / reads,
        kv_token_s=shape.kv_bytes / reads,
        token_s=2 * shape.active / computes,
        sharpness=sharpness,
        overhead_s=LAUNCH_S + (PARALLEL_S if devices > 1 else 0.0) + (EAGER_S if eager else 0.0),
        sync_s=DRAFT_LAUNCH_S + layer_s,
        first_s=head_s,
        pass_s=DRAFT_LAUNCH_S + layer_s + head_s,
        request_pass_s=2 * (shape.active / shape.layers + shape.head) / computes,
        active_share=shape.active_share,
    )


def update_token_s(shape: Shape, gpu: Gpu, devices: int, critic: bool, reference: bool) -> float:
    """Seconds per token of all that follows a rollout: log-probs, and the update with recomputation (8 FLOP)."""
    passes = 2 + 8 + (2 if reference else 0) + (10 if critic else 0)
    return passes * shape.active / (gpu.flops * TRAINING_REACHED * devices)


def drafter_tokens_s(shape: Shape, gpu: Gpu, devices: int) -> float:
    """Tokens a second that a replica's spot workers learn from, over three unrolled positions."""
    return gpu.flops * TRAINING_REACHED * devices / (3 * 6 * (shape.active / shape.layers + shape.head))
