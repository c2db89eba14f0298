"""vLLM's scheduler with a draft length K that is chosen anew in every engine step.

`Scheduler.schedule` looks up `self.dynamic_sd_lookup[batch]` once per step, and sends the answer to the workers in
`SchedulerOutput.num_spec_tokens_to_schedule` (vLLM ≥ 0.24). Here an object that asks the policy takes the place of that
list. K is thus fixed before anything is drafted, from batch, context and past acceptance only, which keeps speculative
sampling exact. The K tokens drafted in one step are verified in the next.

Policy, statistics and trace get one `EngineStep` for each finished step. A step waits only for the choice of K. Its
numbers are counted while the model runs the next one, in `get_grammar_bitmask`; so K is chosen without the outcome of
the very latest step, as under asynchronous scheduling anyway.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from verl_tlt.engine_core.decode_load import DecodeLoad, StopBoundary
from verl_tlt.engine_core.grammar_drafts import GrammarDrafts
from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.engine_core.steps import EngineStep
from verl_tlt.messages.rollout import BROKEN_MARK, EngineStats
from verl_tlt.speculation.graph_rules import token_limit
from verl_tlt.speculation.ngram_index import NgramIndex
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.step_control import Limits, StepControl, StepTrace
from verl_tlt.speculation.types import Policy

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

UNLEARNED = 4
"""Finished steps that may wait to be learned from; without calls for a grammar bitmask so many wait."""
MAX_NGRAM_BYTES = 256 << 20
"""Largest n-gram index of an engine: some two million tokens of responses."""


def load_policy(settings: Mapping[str, Any]) -> Policy:
    """The policy that `additional_config["tlt"]` asks for; a ValueError where that is none.

    `settings` hold `speculation` (a dict of `SpeculationConfig`), `arms` (ascending K), `seed`, and optionally
    `active_share` (of the target's weights) and `policy_factory`, "module:function" taking the first three, for a
    policy of one's own.
    """
    speculation, lengths, seed = settings["speculation"], tuple(settings["arms"]), settings.get("seed", 0)
    path = settings.get("policy_factory")
    if path is None:
        return make_policy(speculation["policy"], lengths, speculation["fixed"], settings.get("active_share", 1.0))
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"additional_config.tlt.policy_factory={path} cannot be loaded: {error}") from error
    policy = factory(speculation, lengths, seed)
    if not isinstance(policy, Policy):
        raise ValueError(f"additional_config.tlt.policy_factory={path} makes no verl_tlt.speculation.types.Policy.")
    return policy


def ngram_drafts(speculation: Mapping[str, Any]) -> NgramDrafts | None:
    """What drafts n-grams under these settings (`SpeculationConfig` as a dict); None: nothing does."""
    source = speculation["source"]
    return None if source == "eagle" else NgramDrafts(NgramIndex(MAX_NGRAM_BYTES), source == "ngram")


# Changes vllm: patches/README.md#no-round-trip-to-the-workers-after-a-step-without-drafts
def skip_empty_fetch(core: type[EngineCore]) -> bool:
    """Have `EngineCore.post_step`, a round trip to the workers, do nothing after a step that drafted nothing.

    Returns whether the round trip is saved, by the wrapper or by vLLM itself.
    """
    original = getattr(core, "post_step", None)
    if original is None or "take_draft_token_ids" not in (source := inspect.getsource(inspect.unwrap(original))):
        logger.info("This vLLM fetches drafts in another way: a step with K=0 may cost a round trip to the workers.")
        return False
    if "drafts_expected" in source or hasattr(original, "__wrapped__"):
        return True

    @functools.wraps(original)
    def post_step(self: EngineCore, model_executed: bool) -> None:
        if getattr(self.scheduler, "drafts_expected", True):
            original(self, model_executed)

    core.post_step = post_step
    return True


class _DraftLengthLookup:
    """Takes the place of vLLM's table of draft lengths by batch size, which counts prefill chunks too."""

    def __init__(self, choose: Callable[[], int]) -> None:
        self._choose = choose

    def __getitem__(self, batch: int) -> int:
        return self._choose()


class TLTScheduler(Scheduler):
    """For `async_scheduling=False` (every CPU engine). `schedule` and `update_from_output` bracket each engine step."""

    # Changes vllm: patches/README.md#a-rollout-server-can-ask-the-scheduler
    def __init__(self, *args: object, **kwargs: object) -> None:
        from vllm.v1.engine.core import EngineCore

        super().__init__(*args, **kwargs)
        config: VllmConfig = self.vllm_config
        is_async = bool(config.scheduler_config.async_scheduling)
        if isinstance(self, AsyncScheduler) != is_async:
            raise ValueError(f"{type(self).__name__} with async_scheduling={is_async} would draft nothing.")
        settings = config.additional_config["tlt"]
        trace_dir = os.environ.get("TLT_TRACE_DIR")
        trace = StepTrace(Path(trace_dir) / f"engine-{os.environ.get('TLT_REPLICA', '0')}.jsonl") if trace_dir else None
        draft_config = config.speculative_config.draft_model_config
        longest = getattr(draft_config, "max_model_len", None) or self.max_model_len
        limits = Limits(tuple(settings["arms"]), token_limit(config), longest - self.num_spec_tokens)
        self.tlt = StepControl(load_policy(settings), limits, trace, config.parallel_config.tensor_parallel_size)
        self.tlt_ngram = ngram_drafts(settings["speculation"])
        self._tlt_grammar = GrammarDrafts()
        self.dynamic_sd_lookup = _DraftLengthLookup(self._tlt_choose)
        self.drafts_expected = True
        skip_empty_fetch(EngineCore)
        EngineCore.tlt_call = lambda core, operation, arguments: core.scheduler.tlt_call(operation, arguments)
        self._tlt_load = DecodeLoad(limits.context_limit)
        self._tlt_boundary = StopBoundary()
        self._tlt_undrafted: set[str] = set()  # unfinished requests with `logprob_token_ids`
        # Of the step that is being scheduled.
        self._tlt_k = 0  # drafted in it, or OFF
        self._tlt_known = 0  # requests that were running before it admitted new ones
        self._tlt_kv_tokens = 0
        self._tlt_blocked = False
        # Of steps in flight (one under synchronous scheduling, two or more under asynchronous), and behind them.
        self._tlt_in_flight: deque[EngineStep] = deque()
        self._tlt_finished: list[EngineStep] = []  # not yet learned from
        self._tlt_ended: list[tuple[str, int]] = []  # requests that ended, not yet in a step
        self._tlt_grown = 0  # tokens emitted since the last choice
        self._tlt_waited_s = 0.0  # what engine steps waited for verl-tlt, not yet in a step
        self._tlt_finished_s = self._tlt_idle_since_s = time.perf_counter()

    def tlt_call(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the rollout server (`server.engine_calls`), between two engine steps."""
        if operation == "stats":
            return asdict(self.tlt_stats(**arguments))
        if operation == "policy_changed":
            if self.tlt_ngram:
                self.tlt_ngram.index.new_policy()
            return {}
        return {"control": self.tlt.control, "learned": self.tlt.learned}[operation](**arguments)

    def tlt_stats(self, reset: bool = False) -> EngineStats:
        """Sums since the last reset, n-grams included where they are in use."""
        stats = self.tlt.stats(reset)
        return self.tlt_ngram.counted(stats, reset) if self.tlt_ngram else stats

    # ------------------------------------------------------------------ before the step

    def add_request(self, request: Request) -> None:
        """As vLLM's; K is 0 while one with `logprob_token_ids` is unfinished: steps that verify drafts return few."""
        if getattr(request.sampling_params, "logprob_token_ids", None) is not None:
            self._tlt_undrafted.add(request.request_id)
        super().add_request(request)

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        """As vLLM's, with K chosen by the policy on the way (`_tlt_choose`)."""
        started = time.perf_counter()
        previous = self._tlt_k
        self._tlt_known = len(self.running)
        if self._tlt_undrafted:  # drafted before the first of them came
            previous = min(previous, 0)
            for request in self.running:
                request.spec_token_ids = []
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        waiting = time.perf_counter()
        scheduled = output.num_scheduled_tokens
        if self.tlt_ngram:
            self.tlt_ngram.scheduled(output)
        if not scheduled:
            return output
        self.drafts_expected = output.num_spec_tokens_to_schedule > 0
        if len(scheduled) < len(self.running):
            self._tlt_drop_stale_drafts(scheduled)
        prefilling = self._tlt_load.prefilling & scheduled.keys() if self._tlt_load.prefilling else set()
        batch = len(scheduled) - len(prefilling)
        self._tlt_in_flight.append(
            EngineStep(
                output=output,
                started_s=started,
                paused_s=0.0 if self._tlt_in_flight else started - self._tlt_idle_since_s,
                batch=batch,
                kv_tokens=self._tlt_kv_tokens if batch else 0,
                drafted=self._tlt_k,
                verified=previous,
                blocked=self._tlt_blocked,
                prefilling=prefilling,
                may_lack_drafts=self.tlt_ngram is not None and self.tlt_ngram.without_drafter,
            )
        )
        self._tlt_waited_s += time.perf_counter() - waiting
        return output

    def _tlt_choose(self) -> int:
        """K for the step being scheduled; vLLM's lookup calls it once per step that has work."""
        waiting = time.perf_counter()
        load = self._tlt_load.count(
            self.running, self._tlt_known, self._tlt_grown, max(self._tlt_k, 0), self.finished_req_ids
        )
        self._tlt_grown = 0
        self._tlt_kv_tokens = load.kv_tokens
        longest = self._tlt_load.longest
        self._tlt_blocked = self.tlt.limits.outgrown(longest)
        longest_draft = self._tlt_boundary.room(self.running[self._tlt_known :], max(self._tlt_k, 0))
        self._tlt_k = self.tlt.choose(load, longest, 0 if self._tlt_undrafted else longest_draft)
        self._tlt_waited_s += time.perf_counter() - waiting
        return max(self._tlt_k, 0)

    def _tlt_drop_stale_drafts(self, scheduled: Mapping[str, int]) -> None:
        """Forget drafts of requests that this step leaves out.

        The worker keeps draft probabilities of the last step only. A draft verified later would make it treat every
        draft of that step as certain ("Missing cached draft probabilities"): still exact, but hardly ever accepted.
        """
        for request in self.running:
            if request.spec_token_ids and request.request_id not in scheduled:
                request.spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As vLLM's, cut to the K that was asked for, and not by a grammar.

        A V2 model runner before 0.32 always drafts K_max, and any runner returns K_max zeros where it could not draft.
        """
        k = max(self._tlt_k, 0)
        rows = draft_token_ids.draft_token_ids
        if rows and len(rows[0]) > k:
            draft_token_ids.draft_token_ids = [row[:k] for row in rows]
        super().update_draft_token_ids(draft_token_ids)
        self._tlt_grammar.keep_whole(self.requests, draft_token_ids)
        if self.tlt_ngram:
            waiting = time.perf_counter()
            self.tlt_ngram.propose(self.requests, draft_token_ids.req_ids, k)
            self._tlt_waited_s += time.perf_counter() - waiting

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """As vLLM's, which cuts the rows; what it marks in them is noted."""
        rows = [list(row) for row in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        self._tlt_grammar.note_marks(scheduler_output, draft_token_ids.req_ids, rows)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """As vLLM's, which asks for it once the step was handed to the workers: the time to learn from the last one."""
        self._tlt_learn()
        self._tlt_load.refresh(self.running, scheduler_output.num_scheduled_tokens)
        grammar = super().get_grammar_bitmask(self._tlt_grammar.marked(scheduler_output))
        return self._tlt_grammar.with_first_forbidden(grammar)

    # ------------------------------------------------------------------ after the step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, and each step that did work is queued for `_tlt_learn`."""
        now = time.perf_counter()
        if broken := getattr(model_runner_output, BROKEN_MARK, 0):
            self.tlt.drafter_broke(broken)
        rows, row_of = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        step = self._tlt_step_of(scheduler_output) if scheduler_output.num_scheduled_tokens else None
        if step is not None and scheduler_output.scheduled_spec_decode_tokens:
            # Before vLLM cuts rows at a request's end, and forgets requests.
            step.sampled, step.row_of = list(map(len, rows)), row_of
            if isinstance(self, AsyncScheduler) or self.finished_req_ids:  # cleared when a step is scheduled
                step.gone = scheduler_output.num_scheduled_tokens.keys() - self.requests.keys()
            if self.tlt_ngram:
                self.tlt_ngram.verified(scheduler_output, rows, row_of)
        self._tlt_waited_s += time.perf_counter() - now
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        waiting = time.perf_counter()
        if self.tlt_ngram:
            for client in outputs.values():
                self.tlt_ngram.emitted(client.outputs)
        if step is not None:
            self._tlt_finish(step, outputs, now)
        self._tlt_finished_s = now
        self._tlt_idle_since_s = time.perf_counter()
        self._tlt_waited_s += self._tlt_idle_since_s - waiting
        if not self.running:
            self._tlt_learn()
            self.tlt.flush()
        return outputs

    def _free_request(self, request: Request, *args: object, **kwargs: object) -> object:
        """As vLLM's, which calls it once for each request that ends; only its length is noted."""
        self._tlt_ended.append((request.request_id, request.num_output_tokens))
        self._tlt_undrafted.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _tlt_step_of(self, output: SchedulerOutput) -> EngineStep:
        """The step in flight that vLLM scheduled as `output`; those before it are steps whose result it threw away."""
        step = self._tlt_in_flight.popleft()
        while step.output is not output:
            step = self._tlt_in_flight.popleft()
        return step

    def _tlt_finish(self, step: EngineStep, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        """Complete the step with what came back and queue it; all that costs time is left to `_tlt_learn`."""
        step.outputs = outputs
        step.ended, self._tlt_ended = self._tlt_ended, []
        step.finished_s, step.previous_finished_s, step.unix_s = now, self._tlt_finished_s, time.time()
        step.control_s, self._tlt_waited_s = self._tlt_waited_s, 0.0
        # A prefill's first token counts too, and one that ends may get fewer: `DecodeLoad` counts anew now and then.
        self._tlt_grown += sum(step.sampled) or step.batch
        self._tlt_finished.append(step)
        if len(self._tlt_finished) > UNLEARNED:
            self._tlt_learn()

    def _tlt_learn(self) -> None:
        """Count finished steps, and have the policy learn from them."""
        finished, self._tlt_finished = self._tlt_finished, []
        for step in finished:
            step.count()
            self.tlt.record(step)

    def shutdown(self) -> None:
        self._tlt_learn()
        self.tlt.flush()
        super().shutdown()


class TLTAsyncScheduler(TLTScheduler, AsyncScheduler):
    """For `async_scheduling=True` (vLLM's default with EAGLE drafters on a GPU)."""
