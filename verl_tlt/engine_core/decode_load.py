"""What the coming engine step carries: its batch and context.

An engine step waits for both, so they are updated by the requests that came and went, not counted over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from verl_tlt.speculation.types import Load

if TYPE_CHECKING:
    from vllm.v1.request import Request

RECOUNT_EVERY = 256
"""Steps between two counts over all requests: the sum is off by some tokens with every request that comes or goes."""
OVERDUE = 2 * RECOUNT_EVERY
"""Steps after which a step has to wait for a count over all requests, because `refresh` was not called."""


class DecodeLoad:
    """Counts decode-phase requests and their context while vLLM schedules a step; a prefill that joins does not count.

    All are counted anew where the number of those known is wrong (a preemption), and every `RECOUNT_EVERY` steps while
    the model runs (`refresh`). `longest` is exact near `context_limit`, where the drafter's context ends.
    """

    def __init__(self, context_limit: int) -> None:
        self.context_limit = context_limit
        self.prefilling: set[str] = set()
        """Requests of the coming step that still compute their prompt."""
        self.longest = 0
        """Tokens of the longest context that the coming step may reach, prompts included."""
        self._contexts: dict[str, float] = {}  # of decode-phase requests, less what they have all grown since
        self._joining: list[Request] = []
        self._tokens = 0.0
        self._mean_growth = 0.0
        self._since = 0

    def count(
        self, running: Sequence[Request], known: int, grown: int, draft_length: int, ended: Collection[str] = ()
    ) -> Load:
        """Decode-phase requests of the step being scheduled; where there are none, those that will be after prefill.

        `known` of the `running` ones ran before this step; the others were admitted in it. Since the last call `grown`
        tokens were emitted and some requests `ended`. `draft_length` is the K that the step verifies.
        """
        self.longest += draft_length + 1
        self._since += 1
        self._settle(grown, ended)
        agrees = len(self._contexts) + len(self._joining) == known <= len(running)
        if not agrees or self._since > OVERDUE or self.longest > self.context_limit:
            old = running[:known]
            self._joining = [r for r in old if r.is_prefill_chunk]
            self._recount([r for r in old if not r.is_prefill_chunk], {}, draft_length + 1)
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

    def refresh(self, running: Sequence[Request], scheduled: Mapping[str, int]) -> None:
        """Count over all requests if it is time to; called while a step of `scheduled` tokens by request runs."""
        if self._since >= RECOUNT_EVERY:
            self._recount([r for r in running if r.request_id in self._contexts], scheduled, 0)

    def _settle(self, grown: int, ended: Collection[str]) -> None:
        """Add the tokens emitted, drop requests that ended, take in those whose prompt is done."""
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

    def _recount(self, decoding: Sequence[Request], scheduled: Mapping[str, int], reach: int) -> None:
        """Count over all requests, less `scheduled` tokens; a context may get longer by `reach` in the coming step."""
        self._contexts = {r.request_id: r.num_computed_tokens - scheduled.get(r.request_id, 0) for r in decoding}
        self._tokens, self._mean_growth, self._since = sum(self._contexts.values()), 0.0, 0
        ends = [r.num_computed_tokens + reach for r in decoding] + [r.num_tokens for r in self._joining]
        self.longest = max(ends, default=0)
