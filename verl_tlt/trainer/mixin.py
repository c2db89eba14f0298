"""The TLT side of one RL step, as overrides of the hooks verl's v1 trainers offer.

    prepare_step        stock
    on_sample_begin     watch the idle devices, and train the drafter there: replicas that run dry leave and sleep
                        before (`idle.modes` says whose idle time it is in each mode)
    on_sample_end       stop it (bounded), start merging in the background, then stock: sleep the rest
    old_log_prob        stock forward, tapped; captured states go to the spot workers
    update_actor        stock
    on_step_end         publish what was merged in time, then stock: weight sync, during which every engine
                        reloads its drafter; whoever left rejoins

Whatever fails in here costs speed: it is logged once per kind, counted in `tlt/errors`, and the step goes on as stock.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.utils import Role
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.idle.failure_budget import FailureBudget
from verl_tlt.idle.modes import RULES
from verl_tlt.idle.planner import Planner
from verl_tlt.idle.replica_idle import ReplicaIdlePlanner
from verl_tlt.idle.trainer_idle import TrainerIdlePlanner
from verl_tlt.messages.rollout import STORE_NAME
from verl_tlt.messages.training import BufferStats, RolloutSampling, TappedStates
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trace.metrics import buffer_metrics
from verl_tlt.trainer.bootstrap import Start, first_drafter, saved_drafter
from verl_tlt.trainer.checkpoint import KeepsDrafter
from verl_tlt.trainer.costs import shared_calibration
from verl_tlt.trainer.drafter_store import DrafterStore
from verl_tlt.trainer.drafter_update import DrafterUpdate, update_drafter
from verl_tlt.trainer.fleet import Fleet
from verl_tlt.trainer.pending_work import BufferWatch
from verl_tlt.trainer.routes import Routes, route
from verl_tlt.trainer.runtime_control import RuntimeControl
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.watch import Ended, PhaseReport, SamplingWatch

logger = logging.getLogger(__name__)


def _tlt_replica() -> type:
    from verl_tlt.server.server import TLTvLLMReplica

    return TLTvLLMReplica


class TLTMixin(KeepsDrafter):
    """Mixed in before one of verl's `PPOTrainer` subclasses; what differs between them is in `trainer.register`."""

    tlt_base_mode: str
    """The verl trainer mode this class extends."""

    # What verl's `PPOTrainer` brings, besides what `KeepsDrafter` names.
    actor_rollout_wg: Any
    llm_server_manager: Any
    local_trigger_step: int
    parameter_sync_step: int
    replay_buffer: Any
    resource_pool_manager: Any
    role_worker_mapping: dict[Any, Any]

    def __init__(self, config: Any) -> None:
        _log_to_stderr()
        with open_dict(config):
            # verl's base classes compare the mode with their own names.
            config.trainer.v1.trainer_mode = self.tlt_base_mode
        rollout = config.actor_rollout_ref.rollout
        self.tlt = TLTConfig.from_dict(OmegaConf.to_container(rollout.custom.tlt, resolve=True))
        self.tlt_rule = RULES[self.tlt_base_mode]
        RolloutReplicaRegistry.register("vllm", _tlt_replica)
        self._tlt_errors: dict[str, int] = {}
        self._tlt_spot = False
        self._tlt_watch: SamplingWatch | None = None
        self._tlt_sessions: list[Ended] = []
        self._tlt_merging: Future[DrafterUpdate] | None = None
        self._tlt_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tlt-merge")
        self._tlt_budget = FailureBudget(self.tlt.spot.max_failures)
        self._tlt_buffers: dict[str, BufferStats] = {}
        self._tlt_taking: dict[str, Any] = {}
        self._tlt_routes = Routes((), {})
        self._tlt_tokens = 0
        super().__init__(config)  # type: ignore[call-arg]
        self._tlt_trace = TraceWriter(str(self.tlt.trace.dir), "trainer")
        self._tlt_log = StepLog(self._tlt_trace)
        self._tlt_pending_work = BufferWatch(
            self.replay_buffer,
            multi_turn=rollout.multi_turn.enable,
            wanted=config.data.train_batch_size // self.parameter_sync_step,
        )

    # ------------------------------------------------------------------ set-up

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        for role in (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self._tlt_worker_class())

    def _tlt_worker_class(self) -> type:
        from verl_tlt.actor.worker import TLTActorWorker

        return TLTActorWorker

    def _setup(self) -> None:
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        policy = copy_to_local(model.path, use_shm=model.get("use_shm", False))
        context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        self._tlt_start: Start = first_drafter(
            self.tlt,
            policy,
            dtype_name(rollout.dtype),
            context + self.tlt.speculation.max_draft_length,
            self._tlt_resume_dir(),
        )
        self._tlt_policy_dir = policy
        self._tlt_version = self._tlt_start.served.version
        self._tlt_acceptance = list(self._tlt_start.served.acceptance)
        self._tlt_published_at = 0
        logger.info("TLT starts from %s", self._tlt_start.origin)
        self._tlt_store = ray.remote(DrafterStore).options(name=STORE_NAME, num_cpus=0).remote(self._tlt_start.served)
        super()._setup()  # type: ignore[misc]

    def _tlt_resume_dir(self) -> Path | None:
        """The `global_step_N` directory that verl's `_load_checkpoint` is going to choose."""
        from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

        trainer = self.config.trainer
        if trainer.resume_mode == "auto":
            found = find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
            return Path(found) if found else None
        if trainer.resume_mode == "resume_path":
            return Path(os.path.abspath(trainer.resume_from_path))
        return None

    def on_init_end(self) -> None:
        self._tlt_fleet = self._tlt_new_fleet()
        self._tlt_runtime = RuntimeControl(
            str(self.tlt.trace.dir), list(self._tlt_fleet.replicas), self.tlt.speculation.audit_every
        )
        self._tlt_steer(self.global_steps + 1)
        with self._tlt_guard("start of spot training"):
            if self.tlt.spot.enable:
                self._tlt_start_spot()  # before the first weight sync, so that it brings the verifier weights
        super().on_init_end()  # type: ignore[misc]
        with self._tlt_guard("calibration"):
            if self.tlt.speculation.enable:
                shared_calibration(self._tlt_fleet, self.tlt, self._tlt_policy_dir)
        self._tlt_published_at = self.global_steps
        replicas = self._tlt_fleet.replicas
        standalone = [name for name, replica in replicas.items() if not replica.ranks]
        self._tlt_log.run_started(self.global_steps + 1, self.tlt, list(replicas), standalone, self.config)

    def _tlt_new_fleet(self) -> Fleet:
        return Fleet(self.llm_server_manager, self.actor_rollout_wg.world_size)

    def _tlt_serving(self) -> list[str]:
        """Replicas that hold weights after a weight sync, and so a drafter to be compared."""
        return list(self._tlt_fleet.replicas)

    def _tlt_steer(self, step: int) -> None:
        """Tell the engines who decodes the rollout of `step` without a drafter; the coming weight sync makes it so."""
        with self._tlt_guard("live control"):
            disabled = self._tlt_runtime.drafting_disabled(step)
            if self.tlt.speculation.enable:
                self._tlt_fleet.disable_drafting(disabled)

    def _tlt_start_spot(self) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        ready = self.actor_rollout_wg.tlt_setup(self.tlt, list(self._tlt_start.aux_layers))
        if untapped := next((r.untapped for r in ready if r.untapped), None):
            logger.warning("the drafter is not trained in this run, which speculates with it as it is: %s", untapped)
            return
        replicas = {name: r.ranks for name, r in self._tlt_fleet.replicas.items() if r.ranks}
        self._tlt_routes = route([r.group for r in ready], replicas)
        self._tlt_fleet.start_workers(
            self.resource_pool_manager.resource_pool_dict["global_pool"],
            config=self.tlt,
            policy_dir=self._tlt_policy_dir,
            drafter=self._tlt_start.trainable,
            sampling=RolloutSampling(rollout.temperature, rollout.top_p, rollout.top_k),
            device="cuda" if self.config.trainer.device == "cuda" else "cpu",
        )
        if resumed := saved_drafter(self._tlt_resume_dir()):
            self._tlt_fleet.on_workers("resume", str(resumed))
        self._tlt_spot = True

    # ------------------------------------------------------------------ sampling

    def on_sample_begin(self) -> None:
        super().on_sample_begin()  # type: ignore[misc]
        with self._tlt_guard("watch"):
            self._tlt_settle_buffers()
            self._tlt_watch = SamplingWatch(
                self._tlt_fleet, self._tlt_planner(), self._tlt_pending_work, self.tlt.spot.poll_s, self._tlt_trace,
                self.global_steps, self.tlt_rule.recall,
            )  # fmt: skip

    def _tlt_planner(self) -> Planner:
        """Who decides about the idle time of the phase that begins now."""
        workers, buffers = self._tlt_fleet.workers(), self._tlt_buffers
        # While a late merge is still running, the workers' weights are not theirs to train.
        spot = self._tlt_spot and self._tlt_runtime.switch.spot and self._tlt_merging is None
        ready = [
            n
            for n in workers
            if spot
            and self._tlt_budget.allows(n, self.global_steps)
            and n in buffers
            and buffers[n].train_tokens >= self.tlt.buffer.min_tokens
        ]
        if self.tlt_rule.idle == "trainer" and workers:
            return TrainerIdlePlanner(
                list(workers), begin=time.time(), settle_s=self.tlt.spot.settle_s, spot_workers=ready
            )
        return ReplicaIdlePlanner(
            list(self._tlt_fleet.replicas),
            expected_requests=self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n,
            settle_s=self.tlt.spot.settle_s,
            buffer_ready=bool(ready),
            spot_workers=ready,
        )

    def _add_prompts_to_generate(self, num_prompts: int) -> Any:
        """As verl's; groups that the sampler asks for are served by everybody, also by those who have left."""
        if self._tlt_watch is not None:
            with self._tlt_guard("recall"):
                self._tlt_watch.recall(self.tlt.spot.stop_timeout_s)
        return super()._add_prompts_to_generate(num_prompts)  # type: ignore[misc]

    def on_sample_end(self) -> None:
        report: PhaseReport | None = None
        with self._tlt_guard("end of sampling"):
            watch, self._tlt_watch = self._tlt_watch, None
            if watch is not None:
                report = watch.finish(self.tlt.spot.stop_timeout_s)
                self._tlt_log.sampled(self.global_steps, report)
                self._tlt_charge(report)
            if self.tlt.speculation.enable and self._tlt_last_sample():
                stats = self._tlt_fleet.on_servers("tlt_stats")
                if failed := self._tlt_log.engine_stats(stats):
                    self._tlt_errors["statistics"] = self._tlt_errors.get("statistics", 0) + failed
                self._tlt_log.audited(self._tlt_runtime.report(stats))
        self._tlt_sessions += report.sessions if report is not None else []
        if self._tlt_sessions and self._tlt_last_sample():
            sessions, self._tlt_sessions = self._tlt_sessions, []
            version, dtype = self._tlt_version + 1, dtype_name(self.config.actor_rollout_ref.rollout.dtype)
            self._tlt_merging = self._tlt_pool.submit(
                update_drafter, self._tlt_fleet, self.tlt, sessions, version, dtype
            )
        if self.tlt_rule.recall:
            # Responses that verl aborts now are sent again within a second: to everybody's gate, as in stock.
            with self._tlt_guard("rejoin"), self._tlt_log.overhead("rejoin"):
                self._tlt_fleet.join(list(self._tlt_fleet.replicas))
        super().on_sample_end()  # type: ignore[misc]

    def _tlt_last_sample(self) -> bool:
        """Whether this is the step's last sampling; asynchronous trainers may take several to one weight sync."""
        return self.local_trigger_step == self.parameter_sync_step - 1

    def _tlt_charge(self, report: PhaseReport) -> None:
        """Count failures; three in a row on one replica turn its spot training off, loudly."""
        for session in report.sessions:
            self._tlt_tokens += session.result.tokens if session.result else 0
            if session.error is None:
                self._tlt_budget.succeeded(session.replica)
            elif self._tlt_budget.failed(session.replica, self.global_steps):
                logger.error(
                    "spot training on %s is off for the rest of the run after %d failures in a row; the last one: %s",
                    session.replica, self.tlt.spot.max_failures, session.error,
                )  # fmt: skip

    # ------------------------------------------------------------------ inference and update

    def _compute_reward_colocate(self, batch: Any, metrics: dict[str, Any] | None = None) -> Any:
        with self._tlt_log.phase("reward", self.global_steps):
            return super()._compute_reward_colocate(batch, metrics)  # type: ignore[misc]

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._tlt_log.phase("old_log_prob", self.global_steps):
            batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        if self._tlt_spot:
            with self._tlt_guard("tap"), self._tlt_log.overhead("tap"):
                self._tlt_hand_over()
        return batch

    def _tlt_hand_over(self) -> None:
        """Send what the tap captured on each rank to the spot worker beside it; nobody waits for the copy."""
        routes = self._tlt_routes
        taken: list[TappedStates] = ray.get(self.actor_rollout_wg.tlt_take(routes.shares))
        if errors := sum(t.errors for t in taken):
            self._tlt_errors["tap"] = self._tlt_errors.get("tap", 0) + errors
        for name, worker in self._tlt_fleet.workers().items():
            sequences = [[taken[rank].shards[share] for rank in ranks] for ranks, share in routes.sources[name]]
            weights = taken[self._tlt_fleet.replicas[name].ranks[0]].verifier_weights
            self._tlt_taking[name] = worker.add.remote(self.global_steps, sequences, weights)
        self._tlt_log.tapped(taken)

    def _tlt_settle_buffers(self) -> None:
        """Learn how full the buffers are; their copies ran behind the update."""
        taking, self._tlt_taking = self._tlt_taking, {}
        for name, reference in taking.items():
            self._tlt_buffers.pop(name, None)
            try:
                self._tlt_buffers[name] = found = ray.get(reference)
                if found.incomplete:
                    self._tlt_errors["parts"] = self._tlt_errors.get("parts", 0) + found.incomplete
            except ray.exceptions.RayActorError as error:
                logger.warning("the spot worker of %s died while it took over hidden states: %s", name, error)
                self._tlt_fleet.restart([name])

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._tlt_log.phase("update_actor", self.global_steps):
            return super()._update_actor(batch, metrics)  # type: ignore[misc]

    # ------------------------------------------------------------------ the end of a step

    def on_step_end(self) -> None:
        with self._tlt_guard("publish"), self._tlt_log.overhead("publish"):
            self._tlt_publish()
        self._tlt_steer(self.global_steps + 1)
        with self._tlt_log.phase("update_weights", self.global_steps):
            super().on_step_end()  # type: ignore[misc]
        with self._tlt_guard("rejoin"), self._tlt_log.overhead("rejoin"):
            if self.tlt_rule.idle == "replicas":
                self._tlt_fleet.join(list(self._tlt_fleet.replicas))
            if self.tlt.speculation.enable:
                self._tlt_compare()

    def _tlt_compare(self) -> None:
        """Ask whoever serves which drafter it has loaded."""
        statuses, serving = self._tlt_fleet.on_servers("tlt_status"), self._tlt_serving()
        self._tlt_log.reloaded(self.global_steps, {n: statuses[n] for n in serving}, self._tlt_version)

    def _tlt_publish(self) -> None:
        """Take the merge if it is there; a late one keeps the served version and is looked at again next step."""
        merging = self._tlt_merging
        if merging is None or not merging.done():
            return
        self._tlt_merging = None
        learned = merging.result()
        if learned.drafter is not None:
            self._tlt_fleet.stage(learned.drafter)
            self._tlt_fleet.on_workers("keep", "served")
            self._tlt_store.put.remote(learned.drafter)
            self._tlt_version, self._tlt_published_at = learned.drafter.version, self.global_steps
        if learned.acceptance:
            self._tlt_acceptance = learned.acceptance
        self._tlt_log.published(self.global_steps, learned, self._tlt_version, self._tlt_published_at)
        taus = ", ".join(f"{which} {tau:.2f}" for which, tau in learned.tau.items())
        logger.info("drafter %s (%s); held-out accept length: %s", learned.decision, learned.reason, taus or "unknown")

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any) -> Any:
        result = super()._compute_metrics(batch, metrics, timing_raw, **kwargs)  # type: ignore[misc]
        with self._tlt_guard("metrics"):
            metrics.update(self._tlt_log.finish(self.global_steps, metrics, sum(self._tlt_errors.values())))
            metrics.update(buffer_metrics(self._tlt_buffers.values()))
        return result

    def on_validate_end(self) -> None:
        super().on_validate_end()  # type: ignore[misc]
        with self._tlt_guard("validation"):
            if self.tlt.speculation.enable:
                self._tlt_fleet.on_servers("tlt_stats")  # validation's engine steps are not the next rollout's
                if self._tlt_log.compared and not self._tlt_log.compared.issuperset(self._tlt_serving()):
                    self._tlt_compare()  # verl woke somebody up for the validation


def _log_to_stderr() -> None:
    """What TLT does belongs in the run's log, whatever libraries do to the root logger; verl does the same."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    ours = logging.getLogger("verl_tlt")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
