"""How much work a recipe asks for, and of how many devices. Imports neither verl nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.checks.recipe import (
    ROLLOUT,
    devices,
    devices_per_replica,
    enforce_eager,
    most_requests,
    number,
    replicas_on,
    select,
    trainer_mode,
)
from verl_tlt.config import TLTConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Workload:
    """The numbers of a recipe that decide how long a step takes."""

    policy: str
    """`actor_rollout_ref.model.path`, as it is written."""
    mode: str
    gpus: int
    """Of the trainer."""
    replicas: int
    """That decode."""
    tensor_parallel: int
    """Devices of a replica."""
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
    """Engines without CUDA graphs."""
    critic: bool
    reference: bool
    """A reference policy's log-probs are computed too."""
    multi_turn: bool
    """Responses wait for tools or an environment."""
    refills: bool
    """More groups may be asked for while a batch is sampled, so no replica leaves before the batch is complete."""


def read_workload(config: DictConfig) -> Workload:
    """Look up what decides how long a step takes; raises `TLTConfigError` where a key cannot be read."""
    mode = trainer_mode(config)
    agent = str(select(config, f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent"))
    kl_terms = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    return Workload(
        policy=str(select(config, "actor_rollout_ref.model.path", "")),
        mode=mode,
        gpus=devices(config, "trainer"),
        replicas=replicas_on(config, ROLLOUT if mode == "separate_async" else "trainer"),
        tensor_parallel=devices_per_replica(config),
        requests=number(config, "data.train_batch_size", 0) * max(1, number(config, f"{ROLLOUT}.n", 1)),
        prompt=number(config, "data.max_prompt_length", 512),
        response=number(config, "data.max_response_length", 512),
        max_num_seqs=max(1, most_requests(config)),
        memory_utilization=_share(config, f"{ROLLOUT}.gpu_memory_utilization", 0.5),
        eager=enforce_eager(config),
        critic=str(select(config, "algorithm.adv_estimator", "")) == "gae",
        reference=any(bool(select(config, key, False)) for key in kl_terms),
        multi_turn=bool(select(config, f"{ROLLOUT}.multi_turn.enable", False)) or "tool" in agent,
        refills=bool(select(config, "algorithm.filter_groups.enable", False)),
    )


def _share(config: DictConfig, key: str, default: float) -> float:
    """The number above 0 and up to 1 at a dotted key."""
    value = select(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise TLTConfigError(f"{key} must be above 0 and at most 1, not {value!r}.")
    return float(value)
