"""Stop strings with speculation: a response ends at the token that completes one, as without drafts.

An engine step with a verified draft brings a request up to 1 + K tokens. vLLM's front end is given them one by one, as
it would get them without drafts, so what it concludes is stock's in every output.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

WITH_THE_FIRST = ("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "events", "prefill_stats")
WITH_THE_LAST = ("finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params", "spec_decode_metrics")
"""Fields that only the first, or the last, of a step's outputs keeps; releases of vLLM differ in which exist."""


def token_by_token(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """One engine step's output for a request as outputs of one token each, in order."""
    count = len(output.new_token_ids)
    logprobs, mask = output.new_logprobs, getattr(output, "new_sampling_mask", None)
    routed = getattr(output, "routed_experts", None)
    for i in range(count):
        part = copy.copy(output)
        part.new_token_ids = output.new_token_ids[i : i + 1]
        if logprobs is not None:
            part.new_logprobs = logprobs.slice_request(i, 1)
        if mask is not None:
            part.new_sampling_mask = mask.slice_request(i, 1)
        if routed is not None:
            part.routed_experts = routed[i : i + 1]  # a step of several tokens is no prefill: one row per token
        once = (WITH_THE_FIRST if i else ()) + (WITH_THE_LAST if i < count - 1 else ())
        for name in once:
            if hasattr(part, name):
                setattr(part, name, None)
        yield part


# Changes vllm: patches/README.md#a-response-ends-at-the-token-that-completes-a-stop-string
def end_at_stop_strings(processor: type[OutputProcessor]) -> bool:
    """Have `OutputProcessor.process_outputs` see one token at a time of each request that has stop strings.

    Returns whether the class was changed: not where vLLM cuts tokens itself (0.32).
    """
    original = processor.process_outputs
    if hasattr(processor, "_trim_surplus_tokens") or hasattr(original, "__wrapped__"):
        return False

    @functools.wraps(original)
    def process_outputs(
        self: OutputProcessor, engine_core_outputs: Iterable[EngineCoreOutput], *args: object, **kwargs: object
    ) -> OutputProcessorOutput:
        parts: list[EngineCoreOutput] = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if len(output.new_token_ids) > 1 and state is not None and getattr(state.detokenizer, "stop", None):
                parts += token_by_token(output)
            else:
                parts.append(output)
        return original(self, parts, *args, **kwargs)

    processor.process_outputs = process_outputs
    return True
