"""What `TLTMixin` relies on in verl's `PPOTrainer`, for the type checker: at run time the mixin has no base of its own.

The contract tests hold the same list against verl's source (`compat.upstream_api`).
"""

from __future__ import annotations

from typing import Any


class VerlTrainer:
    """`verl.trainer.ppo.v1.trainer_base:PPOTrainer`, as far as it is used."""

    config: Any
    global_steps: int
    local_trigger_step: int
    parameter_sync_step: int
    actor_rollout_wg: Any
    llm_server_manager: Any
    replay_buffer: Any
    resource_pool_manager: Any
    role_worker_mapping: dict[Any, Any]

    def __init__(self, config: Any) -> None: ...

    def _init_resource_pool_mgr(self) -> None: ...

    def _setup(self) -> None: ...

    def fit(self, agent_loop_manager: Any) -> None: ...

    def on_init_end(self) -> None: ...

    def on_sample_begin(self) -> None: ...

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def on_validate_end(self) -> None: ...

    def _add_prompts_to_generate(self, num_prompts: int) -> Any: ...

    def _compute_reward_colocate(self, batch: Any, metrics: dict[str, Any] | None = None) -> Any: ...

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any: ...

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any: ...

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any
    ) -> Any: ...

    def _save_checkpoint(self) -> None: ...
