"""The TLT trainers, which verl knows as `tlt_<mode>`; imported and registered once verl's own trainers are.

`trainer.mixin` does the work, by the rules in `idle.modes`. Here is what only one mode's trainer has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tlt.trainer.mixin import TLTMixin

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager


class TLTTrainerSync(TLTMixin, PPOTrainerSync):
    """verl's synchronous trainer with TLT."""

    tlt_base_mode = "sync"

    def get_llm_client(self) -> LLMServerClient:
        """verl's client, re-routing requests that a leaving replica rejects."""
        from verl_tlt.server.client import TLTLLMServerClient

        return self.llm_server_manager.get_client(client_cls=TLTLLMServerClient)


class TLTTrainerColocateAsync(TLTMixin, PPOTrainerColocateAsync):
    """verl's trainer with partial rollouts on shared devices, with TLT."""

    tlt_base_mode = "colocate_async"

    def get_llm_client(self) -> LLMServerClient:
        """verl's resuming client, re-routing requests that a leaving replica rejects."""
        from verl_tlt.server.client import TLTFullyAsyncLLMServerClient

        return self.llm_server_manager.get_client(client_cls=TLTFullyAsyncLLMServerClient)


class TLTTrainerSeparateAsync(TLTMixin, PPOTrainerSeparateAsync):
    """verl's trainer with partial rollouts on standalone replicas, with TLT; none leaves, so verl's own client."""

    tlt_base_mode = "separate_async"

    def tlt_worker_class(self) -> type:
        """The actor worker of this mode, with a tap."""
        from verl_tlt.actor.worker import TLTDetachActorWorker

        return TLTDetachActorWorker

    def tlt_standalone(self) -> LLMServerManager:
        """verl's manager of the standalone replicas."""
        return self.standalone_server_manager

    def tlt_colocated_asleep(self) -> bool:
        """The replicas on the trainer's devices sleep, unless they are lent to rollout."""
        return self.current_mode != HybridEngineMode.ROLLOUT


def register_trainers() -> None:
    """Register a TLT form of each of verl's v1 trainers; harmless when called again."""
    for trainer in (TLTTrainerSync, TLTTrainerColocateAsync, TLTTrainerSeparateAsync):
        if (name := f"tlt_{trainer.tlt_base_mode}") not in TRAINER_REGISTRY:
            register_trainer(name)(trainer)
