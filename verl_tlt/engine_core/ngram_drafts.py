"""Drafts of n-grams, in an engine without a drafter (`tlt.speculation.source=ngram`).

With synchronous scheduling drafts pass the scheduler, which knows every request's tokens. The worker has no draft
probabilities, so vLLM verifies each draft as certain. Which draft a request gets depends on verified tokens only, so
sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from verl_tlt.speculation.ngram_index import NgramIndex

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

LEAST_TRUST = 0.2
"""Least acceptance rate of an n-gram's first token at which the n-gram is worth verifying."""


class NgramDrafts:
    """Keeps the index of prompts and responses, and drafts from it."""

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self._matched: dict[str, int] = {}  # request → tokens of the match that its present draft follows

    def scheduled(self, output: SchedulerOutput) -> None:
        """Begin the requests that a step admitted in the index, and end those that have finished."""
        for request in output.finished_req_ids:
            self.index.end(request)
            self._matched.pop(request, None)
        for new in output.scheduled_new_reqs:
            if new.prompt_token_ids is not None:
                self.index.begin(new.req_id, new.prompt_token_ids)

    def verified(self, drafts: Mapping[str, object], sampled: Sequence[int], row_of: Mapping[str, int]) -> None:
        """Learn from a step that verified `drafts`: how many tokens it sampled, by row."""
        for request in drafts:
            tokens = sampled[row_of[request]]
            matched = self._matched.pop(request, None)
            if tokens and matched is not None:
                self.index.trust.learn(matched, tokens > 1)

    def emitted(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.new_token_ids:
                self.index.extend(output.request_id, output.new_token_ids)

    def propose(self, requests: Mapping[str, Request], names: Iterable[str], draft_length: int) -> None:
        """Draft up to `draft_length` tokens for each of these requests that has a match."""
        for name in names:
            request = requests.get(name)
            if request is None or request.is_prefill_chunk:
                continue
            ngram = self.index.propose(name, draft_length, LEAST_TRUST)
            if ngram is not None:
                request.spec_token_ids = ngram.tokens
                self._matched[name] = ngram.matched
