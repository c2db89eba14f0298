"""The probabilities that vLLM's rejection sampler verifies drafts with: those of n-grams, and of a broken drafter.

The V1 model runner takes them from `_get_spec_decode_draft_probs`: the probabilities that the drafter drew its tokens
with, [draft tokens of the step, vocab], or None where every draft counts as certain. V2 keeps the drafter's logits in
`speculator.draft_logits`, [max_num_seqs, K_max, vocab], where `propose` writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch

from verl_tlt.messages.rollout import BROKEN_MARK, NGRAM_MARK
from verl_tlt.vllm_worker.drafter_pass import unknown_v2

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)


# Changes vllm: patches/README.md#n-gram-drafts-are-verified-as-certain
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
    """Drops the drafts of a drafter whose probabilities are NaN, and counts them.

    With V1 such a row becomes zeros: the draft is rejected, and what takes its place is drawn from the policy. With V2
    it becomes a certain draft of the token that was drafted. Either is exact, because such a token does not depend on
    what the policy's tokens are drawn with. The count is copied to the host without a wait. The drafter's KV cache
    holds NaN too then, which attention meets even where it is masked (0 times NaN is NaN), so it is cleared in the
    first step after `drafter_loaded`: at the reload itself verl has not woken it up, and it is not mapped.

    A `RuntimeError` where this vLLM keeps a drafter's probabilities elsewhere: it would emit token 0 for such a draft.
    `switch_off` is called when drafts were dropped, but not where the engine has several ranks: each of those hears of
    it at its own time, and in a pass that one of them leaves out the others wait for it.
    """

    # Changes vllm: patches/README.md#a-broken-drafters-drafts-are-rejected
    def __init__(self, runner: GPUModelRunner | V2ModelRunner, switch_off: Callable[[], object]) -> None:
        self._runner = runner
        self._proposer = runner.speculator if hasattr(runner, "speculator") else runner.drafter
        self._dropped = torch.zeros((), dtype=torch.int64, device=runner.device)
        on_host = self._dropped.device.type == "cpu"
        self._on_host = self._dropped if on_host else torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._reported = self._cleared = 0
        alone = runner.vllm_config.parallel_config.tensor_parallel_size == 1
        self._clears_next = False
        if hasattr(runner, "speculator"):
            self._guard_logits()
        else:
            self._guard_probabilities()
        sample = runner.sample_tokens

        def sample_tokens(*args: object, **kwargs: object) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
            if self._clears_next:
                self._clear_cache()
            output = sample(*args, **kwargs)
            if newly_dropped := int(self._on_host) - self._reported:
                self._reported += newly_dropped
                if alone:
                    switch_off()
                # Under async scheduling what the scheduler will see is inside: V1's name and V2's.
                inner = getattr(output, "_model_runner_output", getattr(output, "model_runner_output", output))
                setattr(inner, BROKEN_MARK, newly_dropped)
            return output

        runner.sample_tokens = sample_tokens

    def _guard_probabilities(self) -> None:
        """V1: empty broken rows where drafts are verified."""
        probabilities = getattr(self._runner, "_get_spec_decode_draft_probs", None)
        if probabilities is None:
            raise RuntimeError("This vLLM keeps no draft probabilities where verl-tlt expects them.")

        def sound_probabilities(metadata: SpecDecodeMetadata) -> torch.Tensor | None:
            probs: torch.Tensor | None = probabilities(metadata)
            return probs if probs is None else self._drop(probs)

        self._runner._get_spec_decode_draft_probs = sound_probabilities

    def _guard_logits(self) -> None:
        """V2: make broken rows certain where they were drafted, before the next step verifies them."""
        speculator = self._proposer
        reason = unknown_v2(type(self._runner), type(speculator))
        if reason is None and getattr(speculator, "draft_logits", None) is None:
            reason = "This vLLM keeps no draft logits where verl-tlt expects them"
        if reason is not None:
            raise RuntimeError(f"{reason}; set VLLM_USE_V2_MODEL_RUNNER=0.")
        from verl_tlt.vllm_worker.draft_rows import make_certain

        propose = speculator.propose

        def sound_logits(input_batch: InputBatch, *args: object, **kwargs: object) -> torch.Tensor:
            drafts: torch.Tensor = propose(input_batch, *args, **kwargs)
            drafted = drafts[:, : kwargs.get("num_speculative_tokens")]  # before 0.32 all of them
            if drafted.numel() and not kwargs.get("dummy_run"):
                self._count(make_certain(speculator.draft_logits, input_batch.idx_mapping, drafted))
            return drafts

        speculator.propose = sound_logits

    def _count(self, broken: torch.Tensor) -> None:
        """Add to the count of dropped drafts; `broken` is bool or int of any shape."""
        self._dropped += broken.sum()
        if self._on_host is not self._dropped:
            self._on_host.copy_(self._dropped, non_blocking=True)

    def _drop(self, probs: torch.Tensor) -> torch.Tensor:
        """Fill rows without numbers with zeros, in place; a softmax has NaN everywhere in a row, or nowhere.

        So one column is looked at, and broken rows alone are written: all of them are half a gigabyte for 64 requests.
        """
        broken = probs[:, 0].isnan()  # [draft tokens]
        self._count(broken)
        if probs.is_cuda:
            from verl_tlt.vllm_worker.draft_rows import empty_rows

            empty_rows(probs, broken)
        elif broken.any():
            probs[broken] = 0.0
        return probs

    def drafter_loaded(self) -> None:
        """Another drafter is live: have its KV cache zeroed if drafts were dropped since the last time."""
        dropped = int(self._dropped)  # waits for the device: drafters are loaded between two steps
        self._clears_next |= dropped != self._cleared
        self._cleared = dropped

    def _clear_cache(self) -> None:
        """Zero the drafter's KV cache; never memory that is the policy's."""
        self._clears_next = False
        layers = self._runner.vllm_config.compilation_config.static_forward_context  # by name
        v2 = hasattr(self._proposer, "draft_attn_layer_names")
        own = set(self._proposer.draft_attn_layer_names if v2 else self._proposer._draft_attn_layer_names)
        policys = {kv.data_ptr() for name, layer in layers.items() if name not in own for kv in kv_caches(layer)}
        for name in own:
            for cache in kv_caches(layers[name]):
                if cache.data_ptr() in policys:
                    logger.warning("The drafter's KV cache is the policy's too, so it is not cleared of NaN.")
                else:
                    cache.zero_()


def kv_caches(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """KV cache tensors of a layer; none of one without attention, or before they are allocated."""
    caches = getattr(layer, "kv_cache", ())
    for cache in caches if isinstance(caches, list | tuple) else [caches]:
        if isinstance(cache, torch.Tensor) and cache.numel():
            yield cache
