"""The TLT trainers, which verl knows as `tlt_<mode>`: verl's hooks, each of which calls the `Controller`.

Imported once verl's own trainers are. How the modes differ for TLT is in `idle.planner.MODE_RULES`.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_tlt.logs import log_to_stderr
from verl_tlt.messages.rollout import store_name
from verl_tlt.server.client import TLTFullyAsyncLLMServerClient, TLTLLMServerClient
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.checkpoints import followed
from verl_tlt.trainer.controller import Controller
from verl_tlt.trainer.pending_work import BufferWatch, takes_turns
from verl_tlt.trainer.run_setup import prepare
from verl_tlt.trainer.servers import DrafterStore, Servers
from verl_tlt.trainer.spot import HiddenStates, SpotTrainerHandle
from verl_tlt.trainer.step_log import StepLog

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transfer_queue import KVBatchMeta
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.workers.rollout.llm_server import LLMServerClient


class TLTMixin(PPOTrainer):
    """One RL run with TLT; mixed in before one of verl's trainers."""

    tlt_base_mode: str
    """The verl trainer mode this class extends."""
    tlt: Controller

    def __init__(self, config: DictConfig) -> None:
        log_to_stderr()
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.tlt_base_mode  # verl's base classes know no other
        RolloutReplicaRegistry.register("vllm", _tlt_replica)
        super().__init__(config)

    def tlt_colocated_asleep(self) -> bool:
        """Whether the replicas on the trainer's devices sleep through weight syncs."""
        return False

    # ------------------------------------------------------------------ set-up

    def _init_resource_pool_mgr(self) -> None:
        from verl_tlt.actor.worker import TLTActorWorker

        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(TLTActorWorker)

    def _setup(self) -> None:
        tlt, facts, start, plan = prepare(self.config, self.tlt_base_mode)
        name = store_name(ray.get_runtime_context().get_job_id())
        self._tlt_first = ray.put(start.served)
        # Each server asks for it while it starts.
        self._tlt_store = ray.remote(DrafterStore).options(name=name, num_cpus=0).remote([self._tlt_first])
        without_weights = replace(start, served=replace(start.served, weights=b""))
        self._tlt_run = (tlt, facts, without_weights, plan)
        super()._setup()

    def on_init_end(self) -> None:
        tlt, facts, start, plan = self._tlt_run
        standalone = getattr(self, "standalone_server_manager", None)
        actor = self.actor_rollout_wg
        servers = Servers(self.llm_server_manager, standalone, actor.world_size, self._tlt_first)
        multi_turn = takes_turns(self.config, self.train_dataset)
        wanted = self.config.data.train_batch_size // self.parameter_sync_step
        pending_work = BufferWatch(self.replay_buffer, multi_turn=multi_turn, wanted=wanted)
        log = StepLog(TraceWriter(str(tlt.trace.dir), "trainer"))
        spot = SpotTrainerHandle(plan)
        self.tlt = Controller(tlt, facts, start, servers, HiddenStates(actor), spot, log, pending_work)
        self.tlt.before_first_sync(self.global_steps)
        super().on_init_end()
        self.tlt.after_first_sync(self.global_steps)

    # ------------------------------------------------------------------ a step

    def on_sample_begin(self) -> None:
        self.tlt.sample_begin(self.global_steps)
        super().on_sample_begin()  # begins to count the wait for samples in `separate_async`

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        if hasattr(self, "tlt"):  # the first prompts are sent while the trainer is built
            self.tlt.more_prompts()
        return super()._add_prompts_to_generate(num_prompts)

    def on_sample_end(self) -> None:
        self.tlt_sample_end()
        super().on_sample_end()

    def tlt_sample_end(self) -> None:
        self.tlt.sample_end(self.global_steps, last=self.local_trigger_step == self.parameter_sync_step - 1)

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict | None = None) -> KVBatchMeta:
        with self.tlt.log.phase("reward", self.global_steps):
            return super()._compute_reward_colocate(batch, metrics)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **kwargs: object) -> KVBatchMeta:
        # The engines sleep, the actor has not begun, and none of verl's timers of a phase runs.
        self.tlt.cold_start(self.global_steps)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.tlt.log.phase("old_log_prob", self.global_steps):
            batch = super()._compute_old_log_prob(batch, metrics)
        self.tlt.log_probs_done(self.global_steps)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.tlt.log.phase("update_actor", self.global_steps):
            return super()._update_actor(batch, metrics)

    def on_step_end(self) -> None:
        self.tlt.before_sync(self.global_steps)
        with self.tlt.log.phase("update_weights", self.global_steps):
            super().on_step_end()
        self.tlt.after_sync(self.global_steps, self.tlt_colocated_asleep())

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.tlt.validated(self.global_steps, self.tlt_colocated_asleep())

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, **kwargs: object) -> dict | None:
        result = super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        metrics.update(self.tlt.metrics(self.global_steps, metrics))
        return result

    def _save_checkpoint(self) -> None:
        last = self.critic_wg if self.use_critic else self.actor_rollout_wg  # whose checkpoint verl writes last
        with followed(last, "save_checkpoint", lambda: self.tlt.save(self.global_steps)):
            super()._save_checkpoint()
        self.tlt.saved(self.global_steps)

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            self.tlt.finish()  # verl counts one step further before it returns


class TLTTrainerSync(TLTMixin, PPOTrainerSync):
    tlt_base_mode = "sync"

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=TLTLLMServerClient)


class TLTTrainerColocateAsync(TLTMixin, PPOTrainerColocateAsync):
    tlt_base_mode = "colocate_async"

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=TLTFullyAsyncLLMServerClient)


class _WithoutFlush(logging.LoggerAdapter[logging.Logger]):
    """A logger that is called like print."""

    def process(self, msg: object, kwargs: MutableMapping[str, object]) -> tuple[object, MutableMapping[str, object]]:
        kwargs.pop("flush", None)
        return msg, kwargs


class TLTTrainerSeparateAsync(TLTMixin, PPOTrainerSeparateAsync):
    """verl's trainer with partial rollouts on standalone replicas, with TLT; none leaves, so verl's own client."""

    tlt_base_mode = "separate_async"

    # Changes verl: patches/README.md#verl-logs-that-no-replica-shares-the-trainers-devices
    def _setup(self) -> None:
        trainer_separate_async.logger = _WithoutFlush(trainer_separate_async.logger, {})
        super()._setup()

    def on_sample_end(self) -> None:
        PPOTrainerSeparateAsync.on_sample_end(self)  # the wait for samples is over
        self.tlt_sample_end()

    def tlt_colocated_asleep(self) -> bool:
        return self.current_mode != HybridEngineMode.ROLLOUT  # then they are lent to rollout


def register_trainers() -> None:
    """Register a TLT form of each of verl's v1 trainers; harmless when called again."""
    for trainer in (TLTTrainerSync, TLTTrainerColocateAsync, TLTTrainerSeparateAsync):
        name = f"tlt_{trainer.tlt_base_mode}"
        if name not in TRAINER_REGISTRY:
            register_trainer(name)(trainer)


def _tlt_replica() -> type:
    from verl_tlt.server.server import TLTvLLMReplica

    return TLTvLLMReplica
