"""How much the coming engine step carries, counted while vLLM is scheduling it.

Only requests in their decode phase count: a prefill that joins must not flip the draft length. In a steady batch the
context grows by what the last step emitted, so the requests themselves are looked at only when something changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_tlt.control.types import Load

RECOUNT_EVERY = 64  # steps: growth is an estimate where drafts are in flight (async scheduling)


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
        self._load = Load(0, 0)
        self._steady = 0

    def count(self, running: Sequence[Any], known: int, grown: int, draft_length: int) -> Load:
        """Load of the step being scheduled.

        Args:
            running: vLLM's running requests (`vllm.v1.request.Request`).
            known: how many of them were running before this step; those behind were admitted in it.
            grown: tokens emitted since the last call.
            draft_length: K that the step verifies.

        Returns:
            decode-phase requests; where there are none yet, those that will be after their prefill.
        """
        self.longest += draft_length + 1
        same = len(running) == known == self._load.batch and not self.prefilling
        if same and self._steady < RECOUNT_EVERY and self.longest <= self.context_limit:
            self._steady += 1
            self._load = Load(known, self._load.kv_tokens + grown)
            return self._load
        self._steady = 0
        old = running[:known]
        contexts = [r.num_computed_tokens for r in old if not r.is_prefill_chunk]  # tokens, [batch]
        self.longest = max(contexts, default=0) + draft_length + 1
        self.prefilling = set()
        if len(contexts) < len(running):
            # Those admitted in this step compute their prompt first, whatever `is_prefill_chunk` still says.
            prompts = [r for i, r in enumerate(running) if i >= known or r.is_prefill_chunk]
            self.prefilling = {r.request_id for r in prompts}
            self.longest = max(self.longest, *(r.num_tokens for r in prompts))
            contexts = contexts or [r.num_tokens for r in prompts]
        self._load = Load(len(contexts), sum(contexts))
        return self._load
