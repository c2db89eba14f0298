"""vLLM's scheduler with a draft length K that is looked up anew in every engine step.

`Scheduler.schedule` looks up `self.dynamic_sd_lookup[batch]` once per step, and sends the answer to the workers in
`SchedulerOutput.num_spec_tokens_to_schedule` (vLLM ≥ 0.24). Here `_DraftLengths` replaces that list: it asks the policy
for K, and answers 0 if drafts are impossible or would be verified inexactly. K is fixed before anything is drafted,
from the batch and past steps only, which keeps speculative sampling exact. The K tokens drafted in one step are
verified in the next.

When a step is over, `update_from_output` queues it as one `EngineStep`. It is counted while the model computes the next
step (`_tlt_learn`), and statistics, trace and policy learn from it then, so that no engine step waits for that.

K is 0 while a request runs that vLLM verifies inexactly (`verified_inexactly`). K is also 0 from the first exception in
our own code on (`_contained`): vLLM's part of every method still runs, so the engine decodes on without drafts.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.engine_core.steps import EngineStep
from verl_tlt.speculation.graph_rules import row_limit, token_limit
from verl_tlt.speculation.limits import Limits, context_limit
from verl_tlt.speculation.ngram_index import NgramIndex
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.step_control import FLUSHED_S, StepControl, StepTrace
from verl_tlt.speculation.types import Policy

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

P = ParamSpec("P")
T = TypeVar("T")

MAX_NGRAM_BYTES = 256 << 20
"""Largest n-gram index of an engine: some two million tokens of responses."""


def load_policy(settings: Mapping[str, Any], largest_batch: int, limits: Limits) -> Policy:
    """The policy that `additional_config["tlt"]` asks for; a ControlError where that is none.

    `settings` hold `speculation` (a dict of `SpeculationConfig`). With n-grams the longest draft takes the place of
    `live_table`: a request without a match has no draft, so steps have no cost by K.
    """
    speculation = settings["speculation"]
    without_costs = speculation["source"] == "ngram" and speculation["policy"] == "live_table"
    name = "fixed" if without_costs else speculation["policy"]
    return make_policy(name, limits.lengths, largest_batch, speculation["fixed"], limits)


def ngram_drafts(speculation: Mapping[str, Any]) -> NgramDrafts | None:
    """What drafts n-grams under these settings (`SpeculationConfig` as a dict); None: nothing does."""
    return NgramDrafts(NgramIndex(MAX_NGRAM_BYTES)) if speculation["source"] == "ngram" else None


def _engine_trace() -> StepTrace | None:
    """The trace of this engine's steps; None: no trace is asked for."""
    directory = os.environ.get("TLT_TRACE_DIR")
    if not directory:
        return None
    return StepTrace(Path(directory) / f"engine-{os.environ.get('TLT_REPLICA', '0')}.jsonl")


class _DraftLengths:
    """Takes the place of vLLM's list of draft lengths by batch size."""

    def __init__(self, choose: Callable[[int], int | None]) -> None:
        self._choose = choose

    def __getitem__(self, batch: int) -> int:
        return max(self._choose(batch) or 0, 0)


def verified_inexactly(request: Request) -> bool:
    """Whether vLLM verifies drafts of this request inexactly. There are three causes:

    * A grammar. vLLM cuts a draft before the first token that the grammar forbids, and draws the next token as if none
      had been drafted there. So tokens that the drafter finds likely come too often.
    * `min_tokens`. Until it is reached, vLLM judges the token behind a draft by the tokens before the draft.
    * `asks_logprobs`.
    """
    params = request.sampling_params
    if params is None:
        return False
    too_short = request.num_output_tokens < params.min_tokens
    return too_short or request.use_structured_output or asks_logprobs(request)


def asks_logprobs(request: Request) -> bool:
    """Whether a request has `logprob_token_ids`, of which a step that verifies any draft returns too few."""
    return getattr(request.sampling_params, "logprob_token_ids", None) is not None


def _contained(hook: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a method of our scheduler: an exception in it ends speculation in this engine, not the engine.

    After the first exception in any of them none is called any more, and all return None.
    """

    @functools.wraps(hook)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        scheduler: Any = args[0]
        if scheduler.tlt.failure is not None:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            scheduler.tlt.fail(error)
            scheduler._tlt_k = 0
            scheduler._tlt_drop_drafts()
            return None

    return run


class TLTScheduler(Scheduler):
    """For `async_scheduling=False` (every CPU engine). `schedule` and `update_from_output` bracket each engine step.

    Methods of vLLM's that are overridden here call vLLM's own exactly once; our part of them is `_contained`.
    """

    # Changes vllm: patches/README.md#a-rollout-server-can-ask-the-scheduler
    def __init__(self, *args: object, **kwargs: object) -> None:
        from vllm.v1.engine.core import EngineCore

        super().__init__(*args, **kwargs)
        config: VllmConfig = self.vllm_config
        is_async = bool(config.scheduler_config.async_scheduling)
        if isinstance(self, AsyncScheduler) != is_async:
            raise ValueError(f"{type(self).__name__} with async_scheduling={is_async} would draft nothing.")
        settings = config.additional_config["tlt"]
        draft_config = config.speculative_config.draft_model_config
        longest = getattr(draft_config, "max_model_len", None) or self.max_model_len
        # K is chosen by the contexts of two steps before; of three, where two steps are in flight.
        self._tlt_context_limit = context_limit(longest, self.num_spec_tokens, behind=3 if is_async else 2)
        rows = row_limit(config.device_config.device_type == "cpu", self.max_num_running_reqs)
        limits = Limits(tuple(settings["arms"]), token_limit(config), rows)
        policy = load_policy(settings, self.max_num_running_reqs, limits)
        self.tlt = StepControl(policy, limits, _engine_trace())
        self.tlt_ngram = ngram_drafts(settings["speculation"])
        self.dynamic_sd_lookup = _DraftLengths(self._tlt_choose)
        EngineCore.tlt_call = lambda core, operation, arguments: core.scheduler.tlt_call(operation, arguments)
        self._tlt_inexact: list[Request] = []
        """Unfinished requests that are `verified_inexactly`, running or not."""
        # Of the step that is being scheduled.
        self._tlt_started_s = 0.0
        self._tlt_k = 0  # drafted in it, or OFF
        self._tlt_verified = 0  # drafted in the step before, or OFF
        self._tlt_blocked = False  # a context is too long for the drafter
        # Of steps in flight (one under synchronous scheduling, two or more under asynchronous), and behind them.
        self._tlt_in_flight: deque[EngineStep] = deque()
        self._tlt_finished: list[EngineStep] = []  # not yet counted
        self._tlt_ended = False  # whether a request ended since the last step was queued
        self._tlt_waited_s = 0.0  # what engine steps waited for verl-tlt, not yet in a step
        self._tlt_finished_s = self._tlt_idle_since_s = time.perf_counter()

    def tlt_call(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the rollout server (`server.engine_calls`), between two engine steps.

        vLLM returns an exception to the server, and goes on.
        """
        self._tlt_learn()
        if operation == "stats":
            return asdict(self.tlt.stats(**arguments))
        if operation == "policy_changed":
            if self.tlt_ngram:
                self.tlt_ngram.index.new_policy()
            return {}
        if operation == "control":
            return self.tlt.control(**arguments)
        raise ValueError(f"The scheduler knows no operation {operation}.")

    # ------------------------------------------------------------------ before the step

    def add_request(self, request: Request) -> None:
        """As vLLM's; a request that is `verified_inexactly` is noted."""
        self._tlt_arrived(request)
        super().add_request(request)

    @_contained
    def _tlt_arrived(self, request: Request) -> None:
        if verified_inexactly(request):
            self._tlt_inexact.append(request)

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        """As vLLM's, with K chosen by the policy on the way (`_tlt_choose`)."""
        self._tlt_begin_step()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._tlt_scheduled(output)
        return output

    @_contained
    def _tlt_begin_step(self) -> None:
        self._tlt_started_s = time.perf_counter()
        self._tlt_verified = self._tlt_k
        if self._tlt_inexact:
            self._tlt_inexact = [r for r in self._tlt_inexact if not r.is_finished() and verified_inexactly(r)]
        if any(map(asks_logprobs, self._tlt_inexact)):  # this step may be its first
            self._tlt_verified = min(self._tlt_k, 0)
            self._tlt_drop_drafts()

    @property
    def _tlt_abstains(self) -> bool:
        """Whether K must be 0 for the sake of a request of the step being scheduled, or of the next one."""
        return any(r.status == RequestStatus.RUNNING or asks_logprobs(r) for r in self._tlt_inexact)

    def _tlt_drop_drafts(self) -> None:
        """Forget the drafts that are to be verified in the coming step, whatever they are."""
        for request in self.running:
            request.spec_token_ids = []

    @_contained
    def _tlt_choose(self, batch: int) -> int:
        """K for the step being scheduled, or OFF; vLLM's lookup calls it once per step that has work."""
        waiting = time.perf_counter()
        chosen = self.tlt.choose(batch)
        self._tlt_k = min(chosen, 0) if self._tlt_blocked or self._tlt_abstains else chosen
        self._tlt_waited_s += time.perf_counter() - waiting
        return self._tlt_k

    @_contained
    def _tlt_scheduled(self, output: SchedulerOutput) -> None:
        """Queue a step that vLLM has scheduled, and drop drafts of requests that it leaves out."""
        waiting = time.perf_counter()
        scheduled = output.num_scheduled_tokens
        if self.tlt_ngram:
            self.tlt_ngram.scheduled(output)
        if not scheduled:
            return
        if len(scheduled) < len(self.running):
            self._tlt_drop_stale_drafts(scheduled)
        self._tlt_in_flight.append(
            EngineStep(
                output=output,
                started_s=self._tlt_started_s,
                paused_s=0.0 if self._tlt_in_flight else self._tlt_started_s - self._tlt_idle_since_s,
                batch=0,
                kv_tokens=0,
                drafted=self._tlt_k,
                verified=self._tlt_verified,
                blocked=self._tlt_blocked,
            )
        )
        self._tlt_waited_s += time.perf_counter() - waiting

    def _tlt_drop_stale_drafts(self, scheduled: Mapping[str, int]) -> None:
        """Forget drafts of requests that this step leaves out.

        The worker keeps draft probabilities of the last step only. A draft verified later would make it treat every
        draft of that step as certain ("Missing cached draft probabilities"): still exact, but hardly ever accepted.
        """
        for request in self.running:
            if request.spec_token_ids and request.request_id not in scheduled:
                request.spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As vLLM's, cut to the K that was asked for: a worker returns K_max zeros where it could not draft."""
        k = max(self._tlt_k, 0)
        rows = draft_token_ids.draft_token_ids
        if rows and len(rows[0]) > k:  # all rows of a step are equally long
            draft_token_ids.draft_token_ids = [row[:k] for row in rows]
        super().update_draft_token_ids(draft_token_ids)
        self._tlt_propose_ngrams(draft_token_ids)

    @_contained
    def _tlt_propose_ngrams(self, asked: DraftTokenIds) -> None:
        if self.tlt_ngram is None:
            return
        waiting = time.perf_counter()
        self.tlt_ngram.propose(self.requests, asked.req_ids, max(self._tlt_k, 0))
        self._tlt_waited_s += time.perf_counter() - waiting

    # ------------------------------------------------------------------ while the model computes

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """As vLLM's, which calls it once the workers have been given the step."""
        self._tlt_learn()
        return super().get_grammar_bitmask(scheduler_output)

    @_contained
    def _tlt_learn(self) -> None:
        """Count the steps that are over, and have statistics, trace and policy learn from them."""
        finished = self._tlt_finished
        self._tlt_finished = []
        for step in finished:
            step.count()
            self._tlt_blocked = step.longest > self._tlt_context_limit
            self.tlt.record(step)

    # ------------------------------------------------------------------ after the step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; then the step is queued for `_tlt_learn`."""
        now = time.perf_counter()
        step = self._tlt_sampled(scheduler_output, model_runner_output, now)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self._tlt_updated(step, outputs, now)
        return outputs

    @_contained
    def _tlt_sampled(self, output: SchedulerOutput, sampled: ModelRunnerOutput, now: float) -> EngineStep | None:
        """The step in flight that `output` belongs to, with what was sampled; None: it had no work.

        Called before vLLM cuts rows at a request's end, and forgets requests.
        """
        if not output.num_scheduled_tokens:
            return None
        step = self._tlt_step_of(output)
        if output.scheduled_spec_decode_tokens:
            step.sampled = list(map(len, sampled.sampled_token_ids))
            step.row_of = sampled.req_id_to_index
            if self.tlt_ngram:
                self.tlt_ngram.verified(output.scheduled_spec_decode_tokens, step.sampled, step.row_of)
        self._tlt_waited_s += time.perf_counter() - now
        return step

    @_contained
    def _tlt_updated(self, step: EngineStep | None, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        """Note what vLLM made of a step's result."""
        waiting = time.perf_counter()
        if self.tlt_ngram:
            for client in outputs.values():
                self.tlt_ngram.emitted(client.outputs)
        if step is not None:
            self._tlt_finish(step, outputs, now)
        self._tlt_finished_s = now
        self._tlt_idle_since_s = time.perf_counter()
        self._tlt_waited_s += self._tlt_idle_since_s - waiting
        if not self.running:  # no step follows at once
            self._tlt_learn()
            self.tlt.flush()

    def _free_request(self, request: Request, *args: object, **kwargs: object) -> object:
        """As vLLM's, which calls it once for each request that ends."""
        self._tlt_request_ended(request)
        return super()._free_request(request, *args, **kwargs)

    @_contained
    def _tlt_request_ended(self, request: Request) -> None:
        self._tlt_ended = True
        for step in self._tlt_in_flight:
            step.gone.add(request.request_id)

    def _tlt_step_of(self, output: SchedulerOutput) -> EngineStep:
        """The step in flight that vLLM scheduled as `output`; those before it are steps whose result it threw away."""
        step = self._tlt_in_flight.popleft()
        while step.output is not output:
            step = self._tlt_in_flight.popleft()
        return step

    def _tlt_finish(self, step: EngineStep, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        """Queue the step, with all that is known only now."""
        step.outputs = outputs
        step.finished_s = now
        step.previous_finished_s = self._tlt_finished_s
        step.unix_s = time.time()
        step.control_s = self._tlt_waited_s
        self._tlt_waited_s = 0.0
        step.cut = self._tlt_ended
        self._tlt_ended = False
        self._tlt_finished.append(step)

    def shutdown(self) -> None:
        self._tlt_close()
        super().shutdown()

    @_contained
    def _tlt_close(self) -> None:
        self._tlt_learn()
        self.tlt.flush(FLUSHED_S)


class TLTAsyncScheduler(TLTScheduler, AsyncScheduler):
    """For `async_scheduling=True` (vLLM's default with EAGLE drafters on a GPU)."""
