"""verl's rollout servers with a drafter, as Ray actors without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from verl_tlt.checks.recipe import compose
from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterFile, store_name
from verl_tlt.trainer.run_setup import first_drafter
from verl_tlt.trainer.servers import DrafterStore

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it a CPU's engine has its worker in one more process
    "TOKENIZERS_PARALLELISM": "false",
}


class ServedPolicy:
    """The toy's policy, and the servers and the drafter that a run with these settings of a drafter has."""

    def __init__(self, assets: Any, drafter: dict[str, Any]) -> None:
        self.policy = assets.policy
        speculation = {"policy": "fixed", "max_draft_length": 2}
        self.tlt = TLTConfig.from_dict({"drafter": drafter, "speculation": speculation})

    @cached_property
    def config(self) -> Any:
        """verl's whole config."""
        from omegaconf import open_dict

        rollout = "actor_rollout_ref.rollout"
        overrides = [
            f"actor_rollout_ref.model.path={self.policy}", f"{rollout}.name=vllm",
            f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.dtype=float32", f"{rollout}.load_format=auto",
            f"{rollout}.enforce_eager=True", f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
            f"{rollout}.max_model_len=256", f"{rollout}.max_num_seqs=16", f"{rollout}.max_num_batched_tokens=512",
            "data.max_prompt_length=64", "data.max_response_length=128",
        ]  # fmt: skip
        config = compose(overrides, "ppo_trainer")
        with open_dict(config):
            config.actor_rollout_ref.rollout.custom = {"tlt": self.tlt.to_dict()}
        return config

    @cached_property
    def drafter(self) -> DrafterFile:
        """What the servers are to start with."""
        return first_drafter(self.tlt, str(self.policy), "float32", 260, None).served

    def store(self) -> tuple[Any, Any]:
        """The actor that starting servers ask for a drafter, and the reference to that drafter."""
        import ray

        name = store_name(ray.get_runtime_context().get_job_id())
        # Everything is placed without resources, as verl places its servers.
        drafter = ray.put(self.drafter)
        return ray.remote(DrafterStore).options(name=name, num_cpus=0).remote([drafter]), drafter

    def server(self, rank: int, environment: Mapping[str, str] | None = None) -> Any:
        """A server, not launched yet; `environment` is added to its variables."""
        import ray
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.replica import RolloutMode

        from verl_tlt.server.server import TLTvLLMHttpServer

        variables = {"env_vars": {**ENVIRONMENT, **(environment or {})}}
        placed: dict[str, Any] = dict(max_concurrency=100, num_cpus=0, runtime_env=variables)
        return ray.remote(TLTvLLMHttpServer).options(**placed).remote(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout),
            model_config=omega_conf_to_dataclass(self.config.actor_rollout_ref.model),
            rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=rank,
            node_rank=0, gpus_per_node=1, nnodes=1, cuda_visible_devices=str(rank),
        )  # fmt: skip
