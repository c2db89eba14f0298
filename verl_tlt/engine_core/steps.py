"""One engine step from its scheduling until its numbers are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from verl_tlt.speculation.types import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

PAUSE_FLOOR_S = 0.002
"""Gaps between two steps up to this long, in seconds, are part of the step: vLLM's own work."""
PAUSE_SHARE = 0.5
"""A longer gap is a pause if it exceeds this share of the step's own time."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineStep(Step):
    """A `Step` with vLLM's objects, which `count` fills in.

    Until then `verified` is the K at which the step before drafted.
    """

    output: SchedulerOutput
    started_s: float
    paused_s: float
    """Seconds between the end of the step before and the start of this one, if none was in flight."""
    blocked: bool  # a context is too long for the drafter, so that nothing was drafted
    sampled: Sequence[int] = ()
    """Tokens that the step sampled, by row, the target's own included, before vLLM cuts rows at a request's end."""
    row_of: Mapping[str, int] = field(default_factory=dict)  # request → row
    gone: set[str] = field(default_factory=set)  # requests that ended while the step ran; their drafts do not count
    cut: bool = False  # a request ended with this step: vLLM may have cut what was sampled for it
    outputs: Mapping[int, EngineCoreOutputs] = field(default_factory=dict)
    """What the requests got from the step, by client."""
    finished_s: float = 0.0
    previous_finished_s: float = 0.0
    longest: int = 0
    """Tokens of the longest context at the start of the step; of a request that computes its prompt, at the end."""

    def count(self) -> None:
        """Fill in the numbers, as vLLM counts them. No engine step waits for this."""
        prefilling = self._count_load()
        paused = self.paused_s > max(PAUSE_FLOOR_S, PAUSE_SHARE * (self.finished_s - self.started_s))
        self.latency_s = self.finished_s - (self.started_s if paused else self.previous_finished_s)
        self.decode_only = not prefilling and not paused
        if self.sampled and not (self.cut or self.gone or prefilling):
            self.num_decode_tokens = sum(self.sampled)
        else:
            self._count_tokens(prefilling)
        self._count_drafts()

    def _count_tokens(self, prefilling: Collection[str]) -> None:
        for client in self.outputs.values():
            decoded = [len(one.new_token_ids) for one in client.outputs if one.request_id not in prefilling]
            self.num_decode_tokens += sum(decoded)

    def _count_load(self) -> Collection[str]:
        """Count decode-phase requests and their context; returns the requests that compute their prompt."""
        output = self.output
        cached = output.scheduled_cached_reqs
        drafts = output.scheduled_spec_decode_tokens
        scheduled = output.num_scheduled_tokens
        contexts = cached.num_computed_tokens
        self.batch = len(contexts)
        self.kv_tokens = sum(contexts)
        self.longest = max(contexts, default=0)
        self.num_draft_tokens = sum(map(len, drafts.values()))
        decoding = len(scheduled) == len(contexts) and 0 not in cached.num_output_tokens
        if decoding and output.total_num_scheduled_tokens == len(scheduled) + self.num_draft_tokens:
            return ()
        prefilling = {request.req_id for request in output.scheduled_new_reqs}
        known = zip(cached.req_ids, contexts, cached.num_output_tokens, strict=True)
        for request, context, tokens in known:
            if tokens == 0 or scheduled[request] != 1 + len(drafts.get(request, ())):
                prefilling.add(request)
                self.batch -= 1
                self.kv_tokens -= context
                self.longest = max(self.longest, context + scheduled[request])
        computed = [r.num_computed_tokens + scheduled[r.req_id] for r in output.scheduled_new_reqs]
        self.longest = max(self.longest, *computed, 0)
        return prefilling

    def _count_drafts(self) -> None:
        drafts = self.output.scheduled_spec_decode_tokens if self.sampled else {}
        sampled = self.sampled
        if self.gone or 0 in sampled or len(drafts) != len(sampled):
            drafts = {request: draft for request, draft in drafts.items() if self._counts(request)}
            sampled = [self.sampled[self.row_of[request]] for request in drafts]
            self.num_draft_tokens = sum(map(len, drafts.values()))
        drafted_before = self.verified
        self.num_drafts = len(drafts)
        self.verified = drafted_before if self.num_drafts else 0
        rows_with = Counter(sampled)  # rows with so many sampled tokens: the accepted ones and the target's own
        at_least = accumulate(rows_with[1 + k] for k in range(self.verified, 0, -1))  # K, K-1, ... 1 tokens accepted
        self.num_accepted_tokens_per_pos = tuple(at_least)[::-1]
        self.clean = self.decode_only and self._is_steady(drafted_before) and not self.blocked

    def _counts(self, request: str) -> bool:
        """Whether a request's draft counts: the request did not end meanwhile, and vLLM did not discard its tokens."""
        return request not in self.gone and self.sampled[self.row_of[request]] > 0

    def _is_steady(self, drafted_before: int) -> bool:
        """Whether the step drafts at the K of the step before it, and verifies K tokens of every request."""
        if self.drafted != drafted_before:
            return False
        if self.drafted <= 0:
            return True
        return self.num_drafts == self.batch and self.num_draft_tokens == self.verified * self.batch
