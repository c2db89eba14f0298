"""The scheduler's side of n-gram drafts: the only ones, or in place of an EAGLE drafter's where they match.

With synchronous scheduling drafts pass the scheduler, which knows every request's tokens. The step that is sent to the
workers names the requests with an n-gram, which is verified with probability one (`vllm_worker.draft_probabilities`).
Which draft a request gets depends on verified tokens, never on what the drafter drew, so sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_tlt.messages.rollout import NGRAM_MARK, EngineStats
from verl_tlt.speculation.ngram_index import NgramDraft, NgramIndex

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

LEAST_TRUST = 0.2
"""Least acceptance rate of an n-gram's first token at which the n-gram is worth verifying."""
_FADE = 0.99
"""Weight of the past in the drafter's own acceptance, per step."""


class NgramDrafts:
    """Keeps the index of prompts and responses, and drafts from it.

    If not `without_drafter`, an n-gram must be accepted as often as the drafter's own token.
    """

    def __init__(self, index: NgramIndex, without_drafter: bool) -> None:
        self.index, self.without_drafter = index, without_drafter
        self.num_drafts = self.num_accepted = 0
        self._drafter_acceptance = 0.5  # of its first token, lately
        self._proposed: dict[str, NgramDraft] = {}  # by request, for the step that is scheduled next

    def counted(self, stats: EngineStats, reset: bool) -> EngineStats:
        """`stats` with the n-grams verified since the last reset, and those whose first token was accepted."""
        stats = replace(stats, num_ngram_drafts=self.num_drafts, num_ngram_accepted=self.num_accepted)
        if reset:
            self.num_drafts = self.num_accepted = 0
        return stats

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step was scheduled: begin and end requests in the index, and mark whose draft is an n-gram."""
        for request in output.finished_req_ids:
            self.index.end(request)
        for new in output.scheduled_new_reqs:
            if new.prompt_token_ids is not None:
                self.index.begin(new.req_id, new.prompt_token_ids)
        drafts = output.scheduled_spec_decode_tokens
        setattr(output, NGRAM_MARK, {r: draft for r, draft in self._proposed.items() if r in drafts})
        self._proposed = {}

    def verified(self, output: SchedulerOutput, sampled: Sequence[Sequence[int]], row_of: Mapping[str, int]) -> None:
        """Learn from a verified step: the tokens sampled, by row, before the scheduler cuts them at a request's end."""
        ngrams: Mapping[str, NgramDraft] = getattr(output, NGRAM_MARK, {})
        own = own_accepted = 0
        for request in output.scheduled_spec_decode_tokens:
            tokens = len(sampled[row_of[request]])
            if not tokens:
                continue
            if ngram := ngrams.get(request):
                self.index.trust.learn(ngram.matched, tokens > 1)
                self.num_drafts += 1
                self.num_accepted += tokens > 1
            else:
                own, own_accepted = own + 1, own_accepted + (tokens > 1)
        if own:
            self._drafter_acceptance = _FADE * self._drafter_acceptance + (1.0 - _FADE) * own_accepted / own

    def emitted(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.new_token_ids:
                self.index.extend(output.request_id, output.new_token_ids)

    def propose(self, requests: Mapping[str, Request], names: Iterable[str], draft_length: int) -> None:
        """Replace drafts of these requests by n-grams where they match, of `draft_length` tokens at most."""
        least = LEAST_TRUST if self.without_drafter else max(LEAST_TRUST, self._drafter_acceptance)
        for name in names:
            request = requests.get(name)
            if request is None or request.is_prefill_chunk:
                continue
            if self.without_drafter:
                request.spec_token_ids = []
            if draft_length < 1 or request.structured_output_request is not None:
                continue
            ngram = self.index.propose(name, draft_length, least)
            # One length for all keeps the step's cost that of its K; without a drafter a short draft is all there is.
            if ngram is not None and len(ngram.tokens) >= len(request.spec_token_ids):
                request.spec_token_ids = ngram.tokens
                self._proposed[name] = ngram
