"""How much work a recipe asks for, and of how many devices: what the advisor and the simulator start from.

Beside `doctor.facts`, in the same way: read here, judged elsewhere; neither verl nor torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfigError
from verl_tlt.doctor.facts import number, select

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Workload:
    """The numbers of a recipe."""

    policy: str
    """`actor_rollout_ref.model.path`, as it is written."""
    mode: str
    """`trainer.v1.trainer_mode`."""
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
    eager: bool
    """Engines without CUDA graphs."""
    critic: bool
    """A value model is trained as well."""
    reference: bool
    """A reference policy's log-probs are computed as well."""
    multi_turn: bool
    """Responses wait for tools or an environment."""
    refills: bool
    """More groups may be asked for while a batch is sampled, so nobody leaves before it is complete."""


def read_workload(config: DictConfig) -> Workload:
    """Look up what decides how long a step takes.

    Raises:
        TLTConfigError: a key cannot be read, or is no whole number.
    """
    rollout = "actor_rollout_ref.rollout"
    mode = str(select(config, "trainer.v1.trainer_mode", "sync")).removeprefix("tlt_")
    gpus = number(config, "trainer.nnodes", 1) * number(config, "trainer.n_gpus_per_node", 1)
    rollout_gpus = gpus
    if mode == "separate_async":
        rollout_gpus = number(config, f"{rollout}.nnodes", 0) * number(config, f"{rollout}.n_gpus_per_node", 1)
    kinds = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    per_replica = 1
    for kind in kinds:
        per_replica *= max(1, number(config, f"{rollout}.{kind}", 1))
    if rollout_gpus < per_replica:
        raise TLTConfigError(
            f"{rollout}.tensor_model_parallel_size and its like ask for {per_replica} GPUs a replica, and "
            f"trainer.nnodes and trainer.n_gpus_per_node give {rollout_gpus}."
        )
    agent = str(select(config, f"{rollout}.agent.default_agent_loop", "single_turn_agent"))
    return Workload(
        policy=str(select(config, "actor_rollout_ref.model.path", "")),
        mode=mode,
        gpus=gpus,
        replicas=rollout_gpus // per_replica,
        tensor_parallel=per_replica,
        requests=number(config, "data.train_batch_size", 0) * max(1, number(config, f"{rollout}.n", 1)),
        prompt=number(config, "data.max_prompt_length", 512),
        response=number(config, "data.max_response_length", 512),
        max_num_seqs=max(1, number(config, f"{rollout}.max_num_seqs", 256)),
        eager=bool(select(config, f"{rollout}.enforce_eager", False)),
        critic=str(select(config, "algorithm.adv_estimator", "")) == "gae",
        reference=any(
            bool(select(config, key, False))
            for key in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
        ),
        multi_turn=bool(select(config, f"{rollout}.multi_turn.enable", False)) or "tool" in agent,
        refills=bool(select(config, "algorithm.filter_groups.enable", False)),
    )
