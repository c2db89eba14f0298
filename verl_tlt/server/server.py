"""verl's vLLM server and replica with a drafter: the engine's settings, drafter reloads, leaving a rollout early.

After every weight sync the drafter is loaded again from this node's staged file: vLLM's sleep level 2 (verl's default)
discards its weights, and verl sends only the policy's.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest
from vllm.v1.engine.output_processor import OutputProcessor

from verl_tlt.config import TLTConfig
from verl_tlt.drafter.checkpoint import STAGE_DIR, stage
from verl_tlt.drafter.policy import read_model_config
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.files.disk import private_dir
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import DrafterFile, DrafterStatus, EngineStats, store_name
from verl_tlt.server.calibration import calibrate, draft_once, loads_of, sampling_of
from verl_tlt.server.engine_arguments import WORKER_EXTENSION, engine_environment, engine_kwargs, started_lengths
from verl_tlt.server.engine_calls import EngineGone, SchedulerCallError, answered, ask_scheduler, fail_calls_when_dead
from verl_tlt.server.stop_strings import end_at_stop_strings
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.graph_rules import is_hybrid

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

STORE_S = 600.0
"""Bound in seconds of the wait for the run's first drafter, gigabytes to all nodes at once, while the servers start."""
REFUSED = {"thinking_token_budget": "vLLM forces other tokens for it where it speculates"}
"""Sampling parameters that vLLM answers wrongly in an engine that speculates, even in steps without drafts, and why."""
REFUSED_BY_DRAFTERS = {
    "prompt_logprobs": "the drafter's CUDA graphs may overwrite the hidden states that vLLM computes them from"
}
"""Sampling parameters that vLLM answers wrongly beside a drafter, but not with n-grams, and why (vLLM issue 53488)."""
ABORT_S = 10.0
"""Bound in seconds of the end of the requests that still run when the run is over."""
ADMISSION_TIMEOUT_S = 2.0
"""Seconds to wait for admissions, which take milliseconds; one that is stuck means "busy"."""


class TLTvLLMHttpServer(vLLMHttpServer):
    """One engine's server. Methods prefixed `tlt_` are called by the trainer; the others are verl's hooks."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        self.tlt = TLTConfig.from_dict((self.config.custom or {})["tlt"])
        self._tlt_dir: Path | None = None
        self._tlt_asked = 0  # times that a drafter was to be staged
        self._tlt_staged: DrafterFile | None = None
        self._tlt_writes = threading.Lock()
        self._tlt_served = DrafterStatus()
        self._tlt_left = False
        self._tlt_keeps_weights = False
        self._tlt_moves = asyncio.Lock()  # the engine falls asleep or wakes up: one after the other
        self._tlt_file = asyncio.Lock()  # the drafter's file is written or loaded: one after the other
        self._tlt_drafting_disabled = False

    @property
    def _tlt_has_scheduler(self) -> bool:
        """Whether this server's engine core has our scheduler; of several nodes the first has the core."""
        return self.tlt.speculation.enable and self.node_rank == 0

    # ------------------------------------------------------------------ verl's hooks

    async def launch_server(self, *args: object, **kwargs: object) -> None:
        """As verl's; a `TLTError` that says what to do where the engine does not start with its drafter."""
        try:
            await super().launch_server(*args, **kwargs)
        except TLTError:
            raise
        except Exception as error:
            if not self.tlt.speculation.enable:
                raise
            raise TLTError(
                f"The engine of replica {self.replica_rank} does not start with its drafter ({type(error).__name__}: "
                f"{error}). tlt.speculation.enable=false starts it without one."
            ) from error
        if self.node_rank == 0:
            self._tlt_watch = asyncio.create_task(fail_calls_when_dead(self.engine))

    def _preprocess_engine_kwargs(self, kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(kwargs)
        if not self.tlt.speculation.enable:
            return
        store = ray.get_actor(store_name(ray.get_runtime_context().get_job_id()))
        (reference,) = ray.get(store.first.remote(), timeout=STORE_S)
        first: DrafterFile = ray.get(reference, timeout=STORE_S)
        # The path is a part of vLLM's compile-cache key: the same in the next run with a drafter of this shape.
        self._tlt_dir = private_dir(hashlib.sha256(first.config.encode()).hexdigest()[:16])
        self._tlt_write(first, self._tlt_asked)
        path = str(self._tlt_dir / "drafter")
        policy = read_model_config(self.model_config.local_path)
        kwargs.update(engine_kwargs(self.tlt, path, self.config, kwargs, hybrid=is_hybrid(policy)))
        end_at_stop_strings(OutputProcessor)
        # The engine core and its workers are children of this process and inherit these. Each node of an engine has its
        # own folder, which vLLM's config cannot say.
        own = {"TLT_REPLICA": str(self.replica_rank), STAGE_DIR: path}
        os.environ.update(own | engine_environment())
        if self.tlt.trace.dir:
            os.environ["TLT_TRACE_DIR"] = self.tlt.trace.dir

    def _get_worker_extension_cls(self) -> str:
        if not self.tlt.speculation.enable:
            return super()._get_worker_extension_cls()
        return WORKER_EXTENSION

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """As verl's; a `TLTError` where a request asks for something that vLLM answers wrongly if it speculates."""
        if self.tlt.speculation.enable:
            refused = dict(REFUSED)
            if self.tlt.speculation.source == "eagle":
                refused |= REFUSED_BY_DRAFTERS
            for name, why in refused.items():
                if sampling_params.get(name) is not None:
                    raise TLTError(f"A request has {name}: {why}; leave it out, or set tlt.speculation.enable=false.")
        return await super().generate(prompt_ids, sampling_params, *args, **kwargs)

    async def clear_kv_cache(self) -> None:
        """As verl's, which is the last call of every weight sync in every trainer mode; then reload the drafter."""
        await super().clear_kv_cache()
        await self._tlt_reload()
        if self._tlt_left and not self.config.free_cache_engine:  # then verl calls no `wake_up`
            await self._tlt_return()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """As verl's, unless the engine sleeps, which has nothing to abort. In both cases verl opens the gate later."""
        # A server that left and has requests is in the middle of `tlt_try_sleep`: its engine does not sleep yet.
        sleeps = self._tlt_left and not self._tlt_has_requests
        self._tlt_left = False  # the gate is verl's from here on
        if sleeps:
            self._rejecting = reject_request  # False: late requests wait at the gate, as at every other server's
            return {"aborted_count": 0, "request_ids": []}
        return await super().abort_all_requests(reset_prefix_cache=reset_prefix_cache, reject_request=reject_request)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As verl's; a server that left early opens its gate again once it holds weights and cache."""
        async with self._tlt_moves:  # else an engine that is being put to sleep would sleep after this call
            await super().wake_up(tags=tags)
        if self._tlt_left and (tags is None or "kv_cache" in tags):
            await self._tlt_return()

    # ------------------------------------------------------------------ leaving early

    async def tlt_try_sleep(self, recall: bool = False) -> bool:
        """Sleep if and only if no request is in the engine or on its way into it; returns whether the engine sleeps.

        Closing the gate and counting happen on one event loop: a request admitted before is counted in the engine, one
        that comes after is rejected and sent to another replica (`server/client.py`). False: the gate is open again, or
        verl will open it. True, or an exception: it stays closed until the weight sync. `recall`: keep the weights on
        the host, so that after True `tlt_recall` can wake the engine up and open the gate before the weight sync.
        """
        async with self._tlt_moves:
            self._tlt_close_gate(rejecting=True)
            self._tlt_left = True
            self._tlt_keeps_weights = False
            deadline = time.monotonic() + ADMISSION_TIMEOUT_S
            while self._tlt_left and self._admitting > 0 and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            if not self._tlt_left:  # verl has taken the gate over meanwhile
                return False
            if self._tlt_has_requests:
                await self._tlt_return()
                return False
            await answered(self.engine, "sleep", self._tlt_sleep_with_weights() if recall else self.sleep())
            self._tlt_keeps_weights = recall
            return True

    async def _tlt_sleep_with_weights(self) -> None:
        if self.config.free_cache_engine:
            await self.engine.sleep(level=1)  # copies the weights to the host; verl's level 2 drops them
            await self.engine.reset_encoder_cache()

    @property
    def _tlt_has_requests(self) -> bool:
        return bool(self._admitting or self.engine.output_processor.request_states)

    async def tlt_recall(self) -> None:
        """Serve again before the weight sync, with the weights the engine slept with, if this server has left.

        A `RuntimeError` where the weights were not kept: the engine sleeps on until the sync.
        """
        if not self._tlt_left:
            return
        if not self._tlt_keeps_weights:
            raise RuntimeError(f"replica {self.replica_rank} sleeps without its weights")
        async with self._tlt_moves:
            if self.config.free_cache_engine:
                await answered(self.engine, "wake up", super().wake_up())
        if self._tlt_left:  # else verl has taken the gate over meanwhile, and may have the engine asleep again
            await self._tlt_reload()  # the drafter slept too
        if self._tlt_left:
            await self._tlt_return()

    def _tlt_close_gate(self, rejecting: bool) -> None:
        """Have verl reject requests from now on, or let them wait."""
        self._submission_paused = True
        self._rejecting = rejecting
        self._resume_event.clear()

    async def _tlt_return(self) -> None:
        """Serve requests again."""
        self._tlt_left = False
        await self.open_submission_gate()

    async def tlt_close(self) -> None:
        """End the engine, with its sockets and shared memory, and remove the staged drafter.

        Requests that an asynchronous trainer leaves behind are aborted, or they would fail with the engine. What comes
        later waits at the gate.
        """
        if self.node_rank == 0:
            self._tlt_close_gate(rejecting=False)
            if self._tlt_has_requests:
                try:
                    await answered(self.engine, "abort requests", super().abort_all_requests(), ABORT_S)
                except Exception as error:
                    logger.warning("replica %d: the last requests were not aborted: %s", self.replica_rank, error)
            await asyncio.to_thread(self.engine.shutdown)
        if self._tlt_dir is not None:
            shutil.rmtree(self._tlt_dir, ignore_errors=True)

    # ------------------------------------------------------------------ the drafter

    async def tlt_stage(self, drafter: DrafterFile) -> None:
        """Write a published drafter to this node's private directory; it is loaded at the next reload.

        A file of gigabytes is written by a thread, while the server answers other calls.
        """
        self._tlt_asked += 1
        asked = self._tlt_asked
        async with self._tlt_file:
            await asyncio.to_thread(self._tlt_write, drafter, asked)

    def _tlt_write(self, drafter: DrafterFile, asked: int) -> None:
        with self._tlt_writes:  # a call that was given up may write here still, or only now
            if asked == self._tlt_asked:
                assert self._tlt_dir is not None
                stage(drafter.config, drafter.weights, self._tlt_dir / "drafter")
                self._tlt_staged = replace(drafter, weights=b"")  # which are on the disk now

    async def _tlt_reload(self) -> None:
        """Load the staged drafter into the engine; on any failure this engine drafts nothing until the next sync.

        `EngineGone` where the engine died or hangs: the run ends with it, as stock verl's ends at a dead engine.
        """
        start = time.perf_counter()
        if not self._tlt_has_scheduler or self._tlt_staged is None:
            return
        staged = self._tlt_staged
        try:
            async with self._tlt_file:
                staged = self._tlt_staged
                await self._tlt_serve(staged)
        except EngineGone as error:
            logger.error("replica %d cannot go on: %s", self.replica_rank, error)
            raise
        except Exception as error:  # all replicas wait for the weight sync that this is a part of
            known = isinstance(error, DrafterError)
            failure = str(error) if known else f"{type(error).__name__}: {error}"
            logger.error(
                "replica %d cannot use drafter v%d: %s",
                self.replica_rank, staged.version, failure, exc_info=None if known else error,
            )  # fmt: skip
            self._tlt_served = replace(self._tlt_served, ok=False, error=failure)
            await self._tlt_set_drafting(False)
        self._tlt_served = replace(self._tlt_served, seconds=time.perf_counter() - start)

    async def _tlt_serve(self, staged: DrafterFile) -> None:
        """Load the staged drafter if there is one to load, and let the engine draft."""
        if self.tlt.speculation.source == "ngram":
            try:
                await ask_scheduler(self.engine, "policy_changed")
            except SchedulerCallError as error:  # old responses are drafted from as if the policy were the same
                logger.warning("replica %d: its n-grams did not hear of the weight sync: %s", self.replica_rank, error)
        elif not self._tlt_verl_sends_head():
            await self._tlt_load()
            self._tlt_served = replace(self._tlt_served, acceptance=staged.acceptance)
        is_new = staged.version != self._tlt_served.version
        self._tlt_served = replace(self._tlt_served, ok=True, error=None, version=staged.version)
        acceptance: Sequence[float] | None = self._tlt_served.acceptance
        if not acceptance:  # not measured in advance: a new drafter begins anew, the same one keeps what it learned
            acceptance = () if is_new else None
        await self._tlt_set_drafting(not self._tlt_drafting_disabled, acceptance)

    def _tlt_verl_sends_head(self) -> bool:
        """Whether verl trains the policy's MTP head, and sends it with the policy at each weight sync."""
        if self.tlt.drafter.method != "mtp":
            return False
        mtp = self.config.mtp
        return bool(mtp is not None and mtp.enable and mtp.enable_train)

    async def _tlt_load(self) -> None:
        """Have every rank load its node's file; a `DrafterError` if one of them refuses it.

        Whatever is raised, the engine still holds the policy, and can decode without a drafter.
        """
        asked = self.engine.collective_rpc(method="tlt_load_drafter", args=())
        for failure in await answered(self.engine, "load its drafter", asked):
            if failure is not None:
                raise DrafterError(failure)

    async def _tlt_set_drafting(self, drafting: bool, acceptance: Sequence[float] | None = None) -> None:
        """Turn the drafter's own pass on or off; only between rollouts, right after the caches were cleared.

        `acceptance` is what `StepControl.control` takes.

        The scheduler asks for drafts only after every rank has been told to run the pass, and no longer before one is
        told to leave it out. So where a call fails, or a rank can run the pass no more, the engine drafts nothing.
        """
        told = {
            "drafting": drafting,
            "force_k": None if drafting else 0,
            "acceptance": None if acceptance is None else list(acceptance),
        }
        try:
            if not drafting:
                await ask_scheduler(self.engine, "control", **told)
            asked = self.engine.collective_rpc(method="tlt_set_drafting", args=(drafting,))
            for failure in await answered(self.engine, "switch its drafter", asked):
                if failure is not None:
                    raise DrafterError(failure)
            if drafting:
                await ask_scheduler(self.engine, "control", **told)
        except EngineGone:
            raise
        except Exception as error:
            logger.error("replica %d: the engine did not take the drafting switch: %s", self.replica_rank, error)
            failure = str(error) if isinstance(error, DrafterError) else f"{type(error).__name__}: {error}"
            self._tlt_served = replace(self._tlt_served, ok=False, error=failure)
            if drafting:
                await self._tlt_set_drafting(False)

    async def tlt_disable_drafting(self, disabled: bool, at_once: bool = False) -> None:
        """Decode without drafts, or with them, from the next weight sync on (`at_once`: now; the engine is idle)."""
        self._tlt_drafting_disabled = disabled
        if at_once:
            await self._tlt_reload()

    async def tlt_status(self) -> DrafterStatus:
        return self._tlt_served

    async def tlt_stats(self) -> EngineStats:
        """The scheduler's sums since the last call; all zero without speculation."""
        if not self._tlt_has_scheduler:
            return EngineStats()
        try:
            return from_plain(EngineStats, await ask_scheduler(self.engine, "stats", reset=True))
        except Exception as error:
            logger.warning("replica %d: no engine statistics this step: %s", self.replica_rank, error)
            return EngineStats(failure=str(error))

    # ------------------------------------------------------------------ costs

    async def tlt_calibrate(self, known: LatencyTable | None = None) -> LatencyTable:
        """Measure step costs by draft length, batch and context, OFF included, and give them to the scheduler.

        `known` is what another replica measured, used as it is. Empty with n-grams alone, which would look free in
        random prompts: then nothing is measured.
        """
        if not self._tlt_has_scheduler or not self.tlt.speculation.calibrate:
            return LatencyTable()
        lengths = started_lengths(self.engine)
        # Of the policy: a tokenizer may know tokens that the policy has no embedding for.
        vocab_size = self.engine.vllm_config.model_config.get_vocab_size()
        lora = await self._tlt_lora()
        if known is not None:
            costs = known
            await ask_scheduler(self.engine, "control", points=costs.to_list())
            await draft_once(self.engine, lengths[-1], vocab_size, lora)
        else:
            loads = loads_of(self.engine, lengths[-1])
            sampling = sampling_of(self.config)
            costs = await calibrate(self.engine, lengths, loads, vocab_size, sampling=sampling, lora=lora)
            await ask_scheduler(self.engine, "control", points=costs.to_list())
        await ask_scheduler(self.engine, "stats", reset=True)
        return costs

    async def _tlt_lora(self) -> LoRARequest | None:
        """The adapter that verl gives to each request, by the condition of its `generate`.

        Without one vLLM takes CUDA graphs without LoRA, and a step would look faster than it is in a rollout.
        """
        if not self.lora_as_adapter or VLLM_LORA_INT_ID not in await self.engine.list_loras():
            return None
        return LoRARequest(lora_name=VLLM_LORA_NAME, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH)


class TLTvLLMReplica(vLLMReplica):
    """verl's replica with our server; reward and teacher models keep the stock one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(TLTvLLMHttpServer)
