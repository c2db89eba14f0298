"""The probabilities that vLLM's rejection sampler verifies drafts with: 1 for n-grams, 0 for a broken drafter's.

Both functions wrap `GPUModelRunner._get_spec_decode_draft_probs` (V1), which gives the probabilities that the drafter
drew its tokens with, [draft tokens of the step, vocab], or None where every draft counts as certain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch

from verl_tlt.messages.rollout import BROKEN_MARK, NGRAM_MARK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)


def verify_as_certain(runner: GPUModelRunner) -> None:
    """Give n-gram drafts (`engine_core.ngram_drafts` marks them) probability one, beside a drafter's own tokens.

    A `RuntimeError` where this vLLM has no such method.
    """
    if not hasattr(runner, "_get_spec_decode_draft_probs"):
        raise RuntimeError("This vLLM keeps no draft probabilities where verl-tlt expects them; use source=eagle.")
    execute, draft_probs = runner.execute_model, runner._get_spec_decode_draft_probs
    marked: Collection[str] = ()

    def execute_model(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
        nonlocal marked
        marked = getattr(scheduler_output, NGRAM_MARK, ())
        return execute(scheduler_output, *args, **kwargs)

    def with_certain_rows(metadata: SpecDecodeMetadata) -> torch.Tensor | None:
        probs: torch.Tensor | None = draft_probs(metadata)
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

    runner.execute_model, runner._get_spec_decode_draft_probs = execute_model, with_certain_rows


class BrokenDrafts:
    """Drops the drafts of a drafter whose probabilities are NaN, and counts them (why: `patches/README.md`).

    Rows of zeros instead are exact: a draft that had no chance is rejected, and what takes its place is drawn from the
    policy. The count is copied to the host behind the step's other work, without a wait. The drafter's
    KV cache holds NaN too then, which attention may meet even where it is masked (0 times NaN is NaN), so it is cleared
    before another drafter fills it: in the first step after `drafter_loaded`, since verl reloads between waking the
    weights and waking the KV cache, which is not mapped then.

    Args:
        runner: vLLM's V1 model runner.
        switch_off: called in the worker when drafts were dropped.
    """

    def __init__(self, runner: GPUModelRunner, switch_off: Callable[[], object]) -> None:
        self._runner = runner
        self._dropped = torch.zeros((), dtype=torch.int64, device=runner.device)
        on_host = self._dropped.device.type == "cpu"
        self._on_host = self._dropped if on_host else torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._reported = self._cleared = 0
        self._clears_next = False
        probabilities, sample = runner._get_spec_decode_draft_probs, runner.sample_tokens

        def sound_probabilities(metadata: SpecDecodeMetadata) -> torch.Tensor | None:
            probs: torch.Tensor | None = probabilities(metadata)
            return probs if probs is None else self._drop(probs)

        def sample_tokens(*args: object, **kwargs: object) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
            if self._clears_next:
                self._clear_cache(runner.drafter)
            output = sample(*args, **kwargs)
            if newly_dropped := int(self._on_host) - self._reported:
                self._reported += newly_dropped
                switch_off()
                # Under async scheduling what the scheduler will see is inside.
                setattr(getattr(output, "_model_runner_output", output), BROKEN_MARK, newly_dropped)
            return output

        runner._get_spec_decode_draft_probs, runner.sample_tokens = sound_probabilities, sample_tokens

    def _drop(self, probs: torch.Tensor) -> torch.Tensor:
        """Zeros for rows without numbers, in place; a softmax has NaN everywhere in a row, or nowhere.

        So one column is looked at, and broken rows alone are written: all of them are half a gigabyte for 64 requests.
        """
        broken = probs[:, 0].isnan()  # [draft tokens]
        self._dropped += broken.sum()
        if self._on_host is not self._dropped:
            self._on_host.copy_(self._dropped, non_blocking=True)
        if probs.is_cuda:
            from verl_tlt.vllm_worker.empty_rows import empty_rows

            empty_rows(probs, broken)
        elif broken.any():
            probs[broken] = 0.0
        return probs

    def drafter_loaded(self) -> None:
        """Another drafter is live: have its KV cache zeroed if drafts were dropped since the last time."""
        dropped = int(self._dropped)  # waits for the device: drafters are loaded between two steps
        self._clears_next |= dropped != self._cleared
        self._cleared = dropped

    def _clear_cache(self, proposer: SpecDecodeBaseProposer) -> None:
        """Zero the drafter's KV cache; never memory that is the policy's."""
        self._clears_next = False
        layers = self._runner.vllm_config.compilation_config.static_forward_context  # by name
        own = set(proposer._draft_attn_layer_names)
        policys = {kv.data_ptr() for name, layer in layers.items() if name not in own for kv in kv_caches(layer)}
        for name in own:
            for cache in kv_caches(layers[name]):
                if cache.data_ptr() in policys:
                    logger.warning("The drafter's KV cache is the policy's too, so it is not cleared of NaN.")
                else:
                    cache.zero_()


def kv_caches(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """KV cache tensors of a layer; none of one without attention, or before they are allocated."""
    found = getattr(layer, "kv_cache", ())
    for cache in found if isinstance(found, list | tuple) else [found]:
        if isinstance(cache, torch.Tensor) and cache.numel():
            yield cache
