"""vLLM's scheduler with a draft length that is chosen anew in every engine step.

The hook: `Scheduler.schedule` asks `self.dynamic_sd_lookup[batch]` once per step how many tokens to draft, and sends
the answer to the workers in `SchedulerOutput.num_spec_tokens_to_schedule` (stock vLLM ≥ 0.24, sync and async
scheduling). Here an object stands in for that list and asks the policy. K is thus fixed before anything is drafted,
from batch, context and past acceptance only, which is what keeps speculative sampling exact. The K drafted in one step
is verified in the next.

Each finished step becomes one `StepRecord`, for the policy, the account and the trace (`speculation/step_control.py`).
A step waits only for K and for counting its drafts; the rest is done while the model runs the next one, in
`get_grammar_bitmask`, which vLLM calls between handing a step to its workers and waiting for them. So K is chosen
without the very latest step's news, as it is under async scheduling anyway.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from verl_tlt.channel import ChannelServer
from verl_tlt.engine_core.empty_drafts import spare_empty_drafts
from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.engine_core.step_trace import StepTrace
from verl_tlt.messages import to_plain
from verl_tlt.messages.rollout import BROKEN_MARK, EngineStats
from verl_tlt.speculation.decision import Limits
from verl_tlt.speculation.decode_load import DecodeLoad, StopBoundary
from verl_tlt.speculation.graph_rules import token_limit
from verl_tlt.speculation.ngram_index import NgramIndex
from verl_tlt.speculation.policies.factory import make_policy
from verl_tlt.speculation.step_control import StepControl
from verl_tlt.speculation.types import Policy, StepRecord
from verl_tlt.speculation.verified import NOTHING, Verified, count_verified

logger = logging.getLogger(__name__)

UNLEARNED = 4  # finished steps that may wait; an engine that never asks for a grammar bitmask learns late
MAX_NGRAM_BYTES = 256 << 20  # per engine: some two million tokens of responses, least recently visited prompts first
PAUSE_FLOOR_S = 0.002  # a gap shorter than this between two steps is vLLM's own work
PAUSE_SHARE = 0.5  # a gap longer than this share of the step itself means that the engine was held up


def scheduler_path(async_scheduling: bool) -> str:
    """The `scheduler_cls` for vLLM. A wrong base would silently draft nothing, so the class checks it again."""
    return f"{__name__}.{'TLTAsyncScheduler' if async_scheduling else 'TLTScheduler'}"


def load_policy(settings: Mapping[str, Any]) -> Policy:
    """The policy that `additional_config["tlt"]` asks for.

    Args:
        settings: `speculation` (dict of `SpeculationConfig`), `arms` (ascending K), `seed`, and optionally
            `policy_factory`: "module:function" taking the same three, for a policy of one's own.

    Raises:
        ControlError: the policy's name, arms or settings cannot be right.
        ValueError: the factory cannot be found.
    """
    speculation, arms, seed = settings["speculation"], tuple(settings["arms"]), settings.get("seed", 0)
    own = settings.get("policy_factory")
    if own is None:
        return make_policy(speculation["policy"], arms, speculation["fixed"])
    module, _, name = own.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"additional_config.tlt.policy_factory={own} cannot be loaded: {error}") from error
    return factory(speculation, arms, seed)


def ngram_drafts(speculation: Mapping[str, Any]) -> NgramDrafts | None:
    """What proposes n-grams under these settings (`SpeculationConfig` as a dict); None: nothing does."""
    if speculation["source"] == "eagle":
        return None
    index = NgramIndex(MAX_NGRAM_BYTES, keep=speculation["ngram_keep"])
    return NgramDrafts(index, alone=speculation["source"] == "ngram")


class _DraftLengthLookup:
    """Stands where vLLM keeps its table of draft lengths by batch size."""

    def __init__(self, choose: Callable[[], int]) -> None:
        self._choose = choose

    def __getitem__(self, batch: int) -> int:
        # vLLM counts prefill chunks in `batch`; the scheduler counts decode-phase requests itself.
        return self._choose()


@dataclass(slots=True)
class _Plan:
    """What was known of a step when it was scheduled, and then what came back."""

    output: SchedulerOutput
    started_s: float
    paused_s: float
    batch: int
    kv_tokens: int
    arm: int
    previous_arm: int
    blocked: bool
    prefilling: set[str]
    undrafted: bool
    """There is no drafter, so a request may go without a draft (`tlt.speculation.source=ngram`)."""
    outputs: Any = None
    freed: list[tuple[str, int]] = field(default_factory=list)
    """(request, its tokens) of those that ended with this step or since the one before."""
    verified: Verified = NOTHING
    ended: bool = False
    finished_s: float = 0.0
    previous_finished_s: float = 0.0
    unix_s: float = 0.0
    control_s: float = 0.0
    """What the engine waited for us since the step before."""

    def tell(self, control: StepControl) -> None:
        """Hand the finished step to the controller."""
        verified, emitted = self.verified, self.verified.tokens
        if emitted is None or self.ended or self.prefilling:  # one that ends gets fewer tokens than were sampled
            counts = [(o.request_id, len(o.new_token_ids)) for client in self.outputs.values() for o in client.outputs]
            emitted = sum(n for _, n in counts)
            produced = sum(n for request, n in counts if request not in self.prefilling)
        else:
            produced = emitted
        paused = self.paused_s > max(PAUSE_FLOOR_S, PAUSE_SHARE * (self.finished_s - self.started_s))
        # Where it may go without, a request's missing draft counts as one of which nothing was accepted: what K costs
        # and brings is then that of the whole batch, as with a drafter.
        drafts = self.batch if self.undrafted and self.previous_arm > 0 else verified.num_drafts
        length = self.previous_arm if drafts else 0
        decode_only = not self.prefilling and not paused
        whole = self.undrafted or (drafts == self.batch and verified.num_draft_tokens == length * self.batch)
        clean = decode_only and not self.blocked and self.arm == self.previous_arm and (self.arm <= 0 or whole)
        step = StepRecord(
            batch=self.batch,
            kv_tokens=self.kv_tokens if self.batch else 0,
            drafted=self.arm,
            verified=length,
            num_drafts=drafts,
            num_accepted_tokens_per_pos=verified.num_accepted_tokens_per_pos(length),
            produced=produced,
            latency_s=self.finished_s - (self.started_s if paused else self.previous_finished_s),
            clean=clean,
        )
        control.record(
            step,
            num_generation_tokens=emitted,
            num_draft_tokens=verified.num_draft_tokens,
            decode_only=decode_only,
            control_s=self.control_s,
            unix_s=self.unix_s,
        )
        control.responses(verified.accepted_of, self.freed)


class TLTScheduler(Scheduler):
    """For `async_scheduling=False` (every CPU engine). `schedule` and `update_from_output` bracket each engine step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tlt_check()
        settings = dict(self.vllm_config.additional_config["tlt"])
        replica = os.environ.get("TLT_REPLICA", "0")
        trace_dir = os.environ.get("TLT_TRACE_DIR")
        trace = StepTrace(Path(trace_dir) / f"engine-{replica}.jsonl") if trace_dir else None
        draft_config = self.vllm_config.speculative_config.draft_model_config
        longest = getattr(draft_config, "max_model_len", None) or self.max_model_len
        limits = Limits(tuple(settings["arms"]), token_limit(self.vllm_config), longest - self.num_spec_tokens)
        self.tlt = StepControl(load_policy(settings), limits, trace)
        self.dynamic_sd_lookup = _DraftLengthLookup(self._tlt_choose)
        self._tlt_load = DecodeLoad(limits.context_limit)
        self._tlt_boundary = StopBoundary()
        self._tlt_plans: deque[_Plan] = deque()  # one under sync scheduling, two or more in flight under async
        self._tlt_done: list[_Plan] = []  # finished steps to learn from
        self._tlt_freed: list[tuple[str, int]] = []  # requests that ended, not yet in a plan
        self._tlt_known = 0  # requests that were running before this step admitted new ones
        self._tlt_kv_tokens = 0
        self._tlt_grown = 0  # tokens emitted since the last choice
        self._tlt_waited_s = 0.0  # what engine steps waited for us, not yet in a record
        self._tlt_arm = 0
        self._tlt_blocked = False
        self._tlt_finished_s = self._tlt_idle_since_s = time.perf_counter()
        self.drafts_expected = True  # for `spare_empty_drafts`
        spare_empty_drafts()
        self.tlt_ngram = ngram_drafts(settings["speculation"])
        address = os.environ.get("TLT_CHANNEL")
        operations: dict[str, Callable[..., dict[str, Any]]] = {
            "stats": lambda reset=False: to_plain(self.tlt_stats(reset)),
            "control": self.tlt.control,
            "learned": self.tlt.learned,
        }
        if self.tlt_ngram:
            operations["policy_changed"] = self.tlt_ngram.policy_changed
        self._tlt_channel = ChannelServer(address, operations) if address else None

    def _tlt_check(self) -> None:
        """Raises ValueError where this scheduler would not do what it says."""
        config = self.vllm_config
        if isinstance(self, AsyncScheduler) != bool(config.scheduler_config.async_scheduling):
            raise ValueError(
                f"{type(self).__name__} with async_scheduling={config.scheduler_config.async_scheduling} would draft "
                "nothing; pass scheduler_cls=scheduler_path(async_scheduling)."
            )
        if config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "TLT needs data_parallel_size=1 inside an engine: ranks would choose different K and hang."
            )
        if self.num_spec_tokens < 1:
            raise ValueError("TLT's scheduler needs a speculative_config with num_speculative_tokens of at least 1.")
        source = config.additional_config["tlt"]["speculation"]["source"]
        if source != "eagle" and config.scheduler_config.async_scheduling:
            raise ValueError(
                f"tlt.speculation.source={source} needs async_scheduling=False: else no draft passes the scheduler."
            )
        if not hasattr(self, "dynamic_sd_lookup"):
            raise ValueError(
                "This vLLM has no per-step draft length (Scheduler.dynamic_sd_lookup); TLT needs 0.24 or later."
            )

    def tlt_stats(self, reset: bool = False) -> EngineStats:
        """Sums since the last reset, n-grams included where they are in use."""
        stats = self.tlt.stats(reset)
        return self.tlt_ngram.counted(stats, reset) if self.tlt_ngram else stats

    # ------------------------------------------------------------------ before the step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's, with K chosen by the policy on the way (`_tlt_choose`)."""
        started = time.perf_counter()
        previous = self._tlt_arm
        self._tlt_known = len(self.running)
        output = super().schedule(*args, **kwargs)
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
        self._tlt_plans.append(
            _Plan(
                output=output,
                started_s=started,
                paused_s=0.0 if self._tlt_plans else started - self._tlt_idle_since_s,
                batch=len(scheduled) - len(prefilling),
                kv_tokens=self._tlt_kv_tokens,
                arm=self._tlt_arm,
                previous_arm=previous,
                blocked=self._tlt_blocked,
                prefilling=prefilling,
                undrafted=self.tlt_ngram is not None and self.tlt_ngram.alone,
            )
        )
        self._tlt_waited_s += time.perf_counter() - waiting
        return output

    def _tlt_choose(self) -> int:
        """K for the step being scheduled; vLLM's lookup calls it once per step that has work."""
        waiting = time.perf_counter()
        load = self._tlt_load.count(
            self.running, self._tlt_known, self._tlt_grown, max(self._tlt_arm, 0), self.finished_req_ids
        )
        self._tlt_grown = 0
        self._tlt_kv_tokens = load.kv_tokens
        longest = self._tlt_load.longest
        self._tlt_blocked = self.tlt.limits.outgrown(longest)
        room = self._tlt_boundary.room(self.running[self._tlt_known :], max(self._tlt_arm, 0))
        self._tlt_arm = self.tlt.choose(load, longest, room)
        self._tlt_waited_s += time.perf_counter() - waiting
        return max(self._tlt_arm, 0)

    def _tlt_drop_stale_drafts(self, scheduled: dict[str, int]) -> None:
        """Forget drafts of requests that this step leaves out.

        The worker keeps draft probabilities of the last step only. A draft verified later would make it treat every
        draft of that step as certain ("Missing cached draft probabilities"): still exact, but hardly ever accepted.
        """
        for request in self.running:
            if request.spec_token_ids and request.request_id not in scheduled:
                request.spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """As vLLM's, cut to the K that was asked for.

        A V2 model runner before 0.32 always drafts K_max, and any runner returns K_max zeros where it could not draft.
        """
        k = max(self._tlt_arm, 0)
        rows = draft_token_ids.draft_token_ids
        if rows and len(rows[0]) > k:
            draft_token_ids.draft_token_ids = [row[:k] for row in rows]
        super().update_draft_token_ids(draft_token_ids)
        if self.tlt_ngram:
            waiting = time.perf_counter()
            self.tlt_ngram.propose(self.requests, draft_token_ids.req_ids, k)
            self._tlt_waited_s += time.perf_counter() - waiting

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM's, which asks for it once the step was handed to the workers: the time to learn from the last one."""
        self._tlt_learn()
        self._tlt_load.refresh(self.running, scheduler_output.num_scheduled_tokens)
        return super().get_grammar_bitmask(scheduler_output)

    # ------------------------------------------------------------------ after the step

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """As vLLM's, and one `StepRecord` for each step that did work."""
        now = time.perf_counter()
        if broken := getattr(model_runner_output, BROKEN_MARK, 0):
            self.tlt.drafter_broke(broken)
        verified = count_verified(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            scheduler_output.total_num_scheduled_tokens,
            model_runner_output.sampled_token_ids,
            model_runner_output.req_id_to_index,
            self._tlt_gone(scheduler_output.num_scheduled_tokens),
        )
        before = len(self.requests)
        if self.tlt_ngram and scheduler_output.scheduled_spec_decode_tokens:
            rows, row_of = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            self.tlt_ngram.verified(scheduler_output, rows, row_of)
        self._tlt_waited_s += time.perf_counter() - now
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        waiting = time.perf_counter()
        if self.tlt_ngram:
            for client in outputs.values():
                self.tlt_ngram.emitted(client.outputs)
        if scheduler_output.num_scheduled_tokens:
            self._tlt_record(scheduler_output, outputs, verified, len(self.requests) != before, now)
        self._tlt_finished_s = now
        self._tlt_idle_since_s = time.perf_counter()
        self._tlt_waited_s += self._tlt_idle_since_s - waiting
        if not self.running:
            self._tlt_learn()
            self.tlt.flush()
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which calls it once for each request that ends; only its length is noted."""
        self._tlt_freed.append((request.request_id, request.num_output_tokens))
        return super()._free_request(request, *args, **kwargs)

    def _tlt_gone(self, scheduled: dict[str, int]) -> Collection[str]:
        """Requests of a step that ended while it ran."""
        if not isinstance(self, AsyncScheduler) and not self.finished_req_ids:  # cleared when the step was scheduled
            return ()
        return () if scheduled.keys() <= self.requests.keys() else scheduled.keys() - self.requests.keys()

    def _tlt_record(
        self, scheduler_output: SchedulerOutput, outputs: Any, verified: Verified, ended: bool, now: float
    ) -> None:
        """Complete the step's plan and queue it; all that costs time is left to `_tlt_learn`."""
        plan = self._tlt_plans.popleft()
        while plan.output is not scheduler_output:  # a step whose result vLLM threw away
            plan = self._tlt_plans.popleft()
        plan.outputs, plan.verified, plan.ended = outputs, verified, ended
        plan.freed, self._tlt_freed = self._tlt_freed, []
        plan.finished_s, plan.previous_finished_s, plan.unix_s = now, self._tlt_finished_s, time.time()
        plan.control_s, self._tlt_waited_s = self._tlt_waited_s, 0.0
        # A prefill's first token counts too, and one that ends may get fewer: `DecodeLoad` counts anew now and then.
        self._tlt_grown += sum(verified.lengths) or plan.batch
        self._tlt_done.append(plan)
        if len(self._tlt_done) > UNLEARNED:
            self._tlt_learn()

    def _tlt_learn(self) -> None:
        """Turn finished steps into records."""
        done, self._tlt_done = self._tlt_done, []
        for plan in done:
            plan.tell(self.tlt)

    def shutdown(self) -> None:
        """As vLLM's; the channel closes and the trace is written out."""
        if self._tlt_channel is not None:
            self._tlt_channel.close()
            self._tlt_channel = None
        self._tlt_learn()
        self.tlt.flush()
        super().shutdown()


class TLTAsyncScheduler(TLTScheduler, AsyncScheduler):
    """For `async_scheduling=True` (vLLM's default with EAGLE drafters on a GPU)."""
