"""n-gram drafts in a vLLM worker: a proposer that proposes nothing, and drafts that are verified as certain.

The scheduler finds n-grams (`engine_core.ngram_drafts`) and marks the requests whose draft is one. An n-gram is
certain: it must be verified with probability one, not with the probability that the drafter gave to a token it drew
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_tlt.messages.rollout import NGRAM_MARK
from verl_tlt.speculation.ngram_index import Proposal


class NoProposals:
    """The drafter of an engine without one: vLLM's `custom_class` proposer, which proposes nothing."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, target: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_args: Any, **_kwargs: Any) -> list[list[int]]:
        """An empty draft for each request."""
        return [[] for _ in sampled_token_ids]


def verify_as_certain(runner: Any) -> None:
    """The worker's side, for an engine with a drafter whose drafts are sampled: n-grams have probability one.

    Args:
        runner: vLLM's V1 `GPUModelRunner`; its `_get_spec_decode_draft_probs` gives the probabilities that drafts were
            drawn with, [draft tokens of the step, vocab], or None where every draft counts as certain.

    Raises:
        RuntimeError: this vLLM has no such method.
    """
    if not hasattr(runner, "_get_spec_decode_draft_probs"):
        raise RuntimeError("This vLLM keeps no draft probabilities where verl-tlt expects them; use source=eagle.")
    execute: Callable[..., Any] = runner.execute_model
    draft_probs: Callable[[Any], torch.Tensor | None] = runner._get_spec_decode_draft_probs
    marked: dict[str, Proposal] = {}

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal marked
        marked = getattr(scheduler_output, NGRAM_MARK, {})
        return execute(scheduler_output, *args, **kwargs)

    def with_certain_rows(metadata: Any) -> torch.Tensor | None:
        probs = draft_probs(metadata)
        if probs is None or not marked:
            return probs
        rows: list[int] = []
        start = 0
        for request, width in zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True):
            if request in marked:
                rows.extend(range(start, start + width))
            start += width
        at = torch.tensor(rows, device=probs.device, dtype=torch.long)
        probs[at] = 0.0
        probs[at, metadata.draft_token_ids[at].long()] = 1.0
        return probs

    runner.execute_model = execute_model
    runner._get_spec_decode_draft_probs = with_certain_rows
