"""A drafter whose probabilities are no numbers: its drafts are rejected, and it is off until it was loaded again.

NaN or infinite weights, or huge ones, give rows of NaN. vLLM's rejection sampler compares with them, nothing is larger
than NaN, and token 0 is sampled. Rows of zeros instead are exact: a draft that had no chance is rejected, and what
takes its place is drawn from the policy alone. They are replaced on the device, and counted there; the count is copied
to the host behind the step's other work, and nobody waits for it: whoever asks sees it as far as the device has got.

The drafter's KV cache holds NaN too then, which attention may meet even where it is masked (0 times NaN is NaN), so it
is cleared before another drafter fills it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_tlt.messages.rollout import BROKEN_MARK

logger = logging.getLogger(__name__)


class BrokenDrafts:
    """Stands between drafter and rejection sampler of a model runner.

    Args:
        runner: vLLM's V1 `GPUModelRunner`; its `_get_spec_decode_draft_probs` gives the probabilities that drafts were
            drawn with, [draft tokens of the step, vocab], or None where every draft counts as certain.
        switch_off: called with the first news of broken drafts, in the worker.
    """

    def __init__(self, runner: Any, switch_off: Callable[[], None]) -> None:
        self._runner = runner
        self._dropped = torch.zeros((), dtype=torch.int64, device=runner.device)
        on_host = self._dropped.device.type == "cpu"
        self._seen = self._dropped if on_host else torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._told = self._cleared = 0
        probabilities: Callable[[Any], torch.Tensor | None] = runner._get_spec_decode_draft_probs
        sample: Callable[..., Any] = runner.sample_tokens

        def sound_probabilities(metadata: Any) -> torch.Tensor | None:
            probs = probabilities(metadata)
            return probs if probs is None else self._drop(probs)

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if news := int(self._seen) - self._told:
                self._told += news
                switch_off()
                # Under async scheduling what the scheduler will see is inside.
                setattr(getattr(output, "_model_runner_output", output), BROKEN_MARK, news)
            return output

        runner._get_spec_decode_draft_probs = sound_probabilities
        runner.sample_tokens = sample_tokens

    def _drop(self, probs: torch.Tensor) -> torch.Tensor:
        """Zeros for rows without numbers, in place; a softmax has NaN everywhere in a row, or nowhere."""
        broken = probs[:, 0].isnan().sum()
        self._dropped += broken
        if self._seen is self._dropped and not broken:  # on the host looking costs less than rewriting
            return probs
        if self._seen is not self._dropped:
            self._seen.copy_(self._dropped, non_blocking=True)
        return probs.nan_to_num_(nan=0.0)

    def clear_cache(self, drafter: Any) -> None:
        """Zero the KV cache of vLLM's proposer `drafter` if any of its drafts was dropped since the last time.

        The drafter's cache, and nothing else: where its memory is the policy's too, it stays as it is.
        """
        dropped = int(self._dropped)  # waits for the device: drafters are loaded between two steps
        if dropped == self._cleared:
            return
        self._cleared = dropped
        layers = self._runner.vllm_config.compilation_config.static_forward_context  # by name
        own = set(drafter._draft_attn_layer_names)
        policys = {kv.data_ptr() for name, layer in layers.items() if name not in own for kv in _caches(layer)}
        for name in own:
            for cache in _caches(layers[name]):
                if cache.data_ptr() in policys:
                    logger.warning("The drafter's KV cache is the policy's too, so it is not cleared of NaN.")
                else:
                    cache.zero_()


def _caches(layer: Any) -> Iterator[torch.Tensor]:
    """KV cache tensors of a layer; none of one without attention, or before they are allocated."""
    found = getattr(layer, "kv_cache", ())
    for cache in found if isinstance(found, list | tuple) else [found]:
        if isinstance(cache, torch.Tensor) and cache.numel():
            yield cache
