"""How much the coming engine step carries, counted while vLLM is scheduling it.

Only requests in their decode phase count: a prefill that joins must not flip the draft length. An engine step waits
for this, so the count goes by what came and went; all requests are looked at only where the books do not agree with the
number that runs (a request was preempted), and now and then while the model runs (`refresh`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_tlt.speculation.types import Load

RECOUNT_EVERY = 256  # steps; the books err by some tokens with every request that comes or goes
OVERDUE = 2 * RECOUNT_EVERY  # when a step has to wait for it: nobody called `refresh`


class DecodeLoad:
    """Counts decode-phase requests and their context.

    Args:
        context_limit: tokens at which the drafter ends; `longest` is exact where it comes near.
    """

    def __init__(self, context_limit: int) -> None:
        self.context_limit = context_limit
        self.prefilling: set[str] = set()
        """Requests of the coming step that still compute their prompt."""
        self.longest = 0
        """Tokens of the longest context that the coming step may reach, prompts included."""
        self._contexts: dict[str, float] = {}  # of decode-phase requests, less what they have all grown since
        self._joining: list[Any] = []
        self._tokens = 0.0
        self._mean_growth = 0.0
        self._since = 0

    def count(
        self, running: Sequence[Any], known: int, grown: int, draft_length: int, ended: Collection[str] = ()
    ) -> Load:
        """Load of the step being scheduled.

        Args:
            running: vLLM's running requests (`vllm.v1.request.Request`).
            known: how many of them were running before this step; those behind were admitted in it.
            grown: tokens emitted since the last call.
            draft_length: K that the step verifies.
            ended: requests that ended since the last call (`Scheduler.finished_req_ids`).

        Returns:
            decode-phase requests; where there are none yet, those that will be after their prefill.
        """
        self.longest += draft_length + 1
        self._since += 1
        self._settle(grown, ended)
        agrees = len(self._contexts) + len(self._joining) == known <= len(running)
        if not agrees or self._since > OVERDUE or self.longest > self.context_limit:
            self._recount(running[:known], draft_length)
        # Those admitted in this step compute their prompt first, whatever `is_prefill_chunk` still says.
        if len(running) > known:
            self._joining += running[known:]
        if not self._joining:
            self.prefilling = set()
            return Load(len(self._contexts), round(self._tokens))
        self.prefilling = {r.request_id for r in self._joining}
        prompts = [r.num_tokens for r in self._joining]
        self.longest = max(self.longest, *prompts)
        if not self._contexts:
            return Load(len(prompts), sum(prompts))
        return Load(len(self._contexts), round(self._tokens))

    def refresh(self, running: Sequence[Any], scheduled: Mapping[str, int]) -> None:
        """Look at every request if it is time to, while a step is under way, whose tokens do not count yet.

        Args:
            running: vLLM's running requests.
            scheduled: request → tokens in the step (`SchedulerOutput.num_scheduled_tokens`).
        """
        if self._since < RECOUNT_EVERY:
            return
        old = [r for r in running if r.request_id in self._contexts]
        self._contexts = {r.request_id: r.num_computed_tokens - scheduled.get(r.request_id, 0) for r in old}
        self._start_anew()
        ends = [r.num_computed_tokens for r in old] + [r.num_tokens for r in self._joining]
        self.longest = max(ends, default=0)

    def _settle(self, grown: int, ended: Collection[str]) -> None:
        """Enter growth, those that ended and those whose prompt is done."""
        if self._contexts:
            self._tokens += grown
            self._mean_growth += grown / len(self._contexts)
        for request in ended:
            context = self._contexts.pop(request, None)
            if context is not None:
                self._tokens -= context + self._mean_growth
        if self._joining:
            joining, self._joining = self._joining, []
            for request in joining:
                if request.request_id in ended:
                    continue
                if request.is_prefill_chunk:
                    self._joining.append(request)
                else:
                    self._contexts[request.request_id] = request.num_computed_tokens - self._mean_growth
                    self._tokens += request.num_computed_tokens

    def _recount(self, old: Sequence[Any], draft_length: int) -> None:
        """Look at every request."""
        self._contexts = {r.request_id: r.num_computed_tokens for r in old if not r.is_prefill_chunk}
        self._joining = [r for r in old if r.is_prefill_chunk]
        self._start_anew()
        self.longest = int(max(self._contexts.values(), default=0)) + draft_length + 1

    def _start_anew(self) -> None:
        """Every context was just looked at."""
        self._tokens = sum(self._contexts.values())
        self._mean_growth, self._since = 0.0, 0
