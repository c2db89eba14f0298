"""FULL CUDA graphs for every draft length, in a vLLM worker that captures them for the longest one alone.

The plan for each release and the arithmetic of graphs are in `speculation.graph_rules`; here is the shim that stands in
for the upstream change in `patches/vllm`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl_tlt.speculation.graph_rules import FULL_GRAPHS

logger = logging.getLogger(__name__)


def capture_every_arm(runner: Any, arms: Sequence[int]) -> None:
    """Give each arm its own FULL graphs; call it when the model is loaded, before graphs are captured.

    The dispatcher tells graphs apart by tokens and requests, so graphs of several widths live side by side; what has to
    change with the batch is the one width that runner and dispatcher believe in. Graphs of all widths share one memory
    pool, of which the largest decides the size. Upstream form: `patches/vllm`.

    Args:
        runner: vLLM's V1 `GPUModelRunner`.
        arms: draft lengths; those whose width does not divide 1 + K_max are left as they are.

    Raises:
        RuntimeError: this vLLM's runner is not the one that is known here.
    """
    needed = ("cudagraph_dispatcher", "uniform_decode_query_len", "_determine_batch_execution_and_padding")
    missing = [name for name in (*needed, "_warmup_and_capture") if not hasattr(runner, name)]
    if missing:
        raise RuntimeError(f"{FULL_GRAPHS}=1 does not know this vLLM: its runner has no {missing[0]}.")
    dispatcher, longest = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
    widths = {1 + arm for arm in arms if longest % (1 + arm) == 0} - {longest}
    initialize, determine = dispatcher.initialize_cudagraph_keys, runner._determine_batch_execution_and_padding
    warm_up = runner._warmup_and_capture

    def believe(width: int) -> None:
        runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = width

    def initialize_cudagraph_keys(mode: Any, width: int = 1) -> None:
        initialize(mode, width)
        full = type(mode).FULL
        if mode.decode_mode() != full or not mode.separate_routine():
            return  # one set of graphs for all widths, or none
        for other in widths:
            believe(other)
            most = other * dispatcher.vllm_config.scheduler_config.max_num_seqs
            for size in dispatcher.compilation_config.cudagraph_capture_sizes:
                if other <= size <= most:
                    for loras in dispatcher._get_lora_cases():
                        key = dispatcher._create_padded_batch_descriptor(size, True, loras > 0, loras)
                        dispatcher.add_cudagraph_key(full, key)
        believe(longest)

    def warmup_and_capture(desc: Any, *args: Any, **kwargs: Any) -> Any:
        if not desc.uniform:
            return warm_up(desc, *args, **kwargs)
        believe(desc.num_tokens // desc.num_reqs)
        try:
            return warm_up(desc, *args, **kwargs)
        finally:
            believe(longest)

    def determine_batch(*args: Any, **kwargs: Any) -> Any:
        width, tokens, requests = kwargs["max_num_scheduled_tokens"], kwargs["num_tokens"], kwargs["num_reqs"]
        capturing = kwargs.get("force_uniform_decode") is not None
        if capturing or width not in widths or tokens != width * requests:
            return determine(*args, **kwargs)
        believe(width)
        try:
            return determine(*args, **kwargs)
        finally:
            believe(longest)

    dispatcher.initialize_cudagraph_keys = initialize_cudagraph_keys
    runner._warmup_and_capture = warmup_and_capture
    runner._determine_batch_execution_and_padding = determine_batch
    logger.info("FULL CUDA graphs are captured for %s tokens a request too.", sorted(widths))
