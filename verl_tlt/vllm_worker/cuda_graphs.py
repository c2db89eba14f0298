"""FULL CUDA graphs for every draft length, where vLLM's V1 model runner captures them for the longest one only.

They are captured where the model runner's source is the one this file was written for; elsewhere only the longest draft
has them, and one line in the log says why. The arithmetic of graphs is in `speculation.graph_rules`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_tlt.speculation.graph_rules import FULL_GRAPHS, token_limit

if TYPE_CHECKING:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.vllm import VllmConfig
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

KNOWN = {
    "CudagraphDispatcher": ("a060ab2f",),
    "_is_uniform_decode": ("e0337d0a",),
    "_determine_batch_execution_and_padding": ("2daff2bd", "4cb4e508"),  # 0.33: without cascade attention and SP
}
"""`digest` of what is wrapped, in vLLM 0.24 to 0.33 (tests/contract/test_vllm_graphs.py)."""
SAYS = {
    "_dummy_run": (
        "max_query_len = self.uniform_decode_query_len if uniform_decode else num_tokens",
        "max_num_scheduled_tokens=max_query_len",
        "force_uniform_decode=uniform_decode",
    ),
    "_warmup_and_capture": ("uniform_decode=desc.uniform", "desc.num_tokens"),
}
"""Code that the rest of the runner must contain; other lines of it change from release to release."""


def prepare_capture(runner: GPUModelRunner | V2ModelRunner, vllm_config: VllmConfig, lengths: Sequence[int]) -> None:
    """Have graphs captured for every draft length in `lengths`, where possible; call it between model load and capture.

    V2 does so by itself (`graph_rules.draft_length_table`).
    """
    if hasattr(runner, "speculator") or not token_limit(vllm_config) or os.environ.get(FULL_GRAPHS) == "0":
        return
    if (reason := unknown(type(runner), type(getattr(runner, "cudagraph_dispatcher", None)), vllm_config)) is None:
        capture_every_length(runner, lengths)
    else:
        logger.warning("Only drafts of %d tokens have FULL CUDA graphs: %s.", lengths[-1], reason)


def captured_lengths(runner: GPUModelRunner | V2ModelRunner, lengths: Sequence[int]) -> tuple[int, ...] | None:
    """Those of `lengths` whose decode steps have FULL graphs in a runner that has captured; None: it captured nothing.

    An attention backend that cannot verify drafts in a FULL graph leaves PIECEWISE ones, whatever was asked for.
    """
    if hasattr(runner, "speculator"):
        graphs = list(getattr(runner.cudagraph_manager, "graphs", ()))
        widths = {graph.uniform_token_count for graph in graphs if graph.cg_mode.name == "FULL"}
    else:
        keys = getattr(getattr(runner, "cudagraph_dispatcher", None), "cudagraph_keys", {})
        graphs = [key for of_mode in keys.values() for key in of_mode]
        full = [key for mode, of_mode in keys.items() if mode.name == "FULL" for key in of_mode]
        widths = {key.num_tokens // key.num_reqs if key.uniform else None for key in full}
    # A graph without a width is for requests of any width.
    return tuple(length for length in lengths if widths & {1 + length, None}) if graphs else None


def unknown(runner: type, dispatcher: type, vllm_config: VllmConfig) -> str | None:
    """Why `capture_every_length` does not know this model runner, from its source; None: it does."""
    model = vllm_config.model_config
    if model.use_mla or model.is_hybrid or model.has_inner_state:
        return "the policy is not made of plain attention alone"
    try:
        parts = {name: getattr(runner, name) for name in (*KNOWN, *SAYS) if name != dispatcher.__name__}
        texts = {name: inspect.getsource(part) for name, part in {**parts, dispatcher.__name__: dispatcher}.items()}
    except (AttributeError, OSError, TypeError) as error:
        return f"vLLM's model runner is another one ({error})"
    changed = [name for name, digests in KNOWN.items() if digest(texts[name]) not in digests]
    changed += [name for name, code in SAYS.items() if any(line not in texts[name] for line in code)]
    return f"vLLM's {changed[0]} is not the one of 0.24 to 0.33" if changed else None


def digest(source: str) -> str:
    """Eight hex digits over a definition's lines, without docstrings and indentation, which releases change freely."""
    source = textwrap.dedent(source)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line.strip() for number, line in enumerate(source.split("\n"), 1) if number not in prose]
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:8]


# Changes vllm: patches/README.md#full-cuda-graphs-for-every-draft-length
def capture_every_length(runner: GPUModelRunner, lengths: Sequence[int]) -> None:
    """Give each length whose width (1 + draft length) divides 1 + K_max its own FULL graphs.

    The dispatcher tells graphs apart by tokens and requests, so it can hold several widths; what has to change with the
    batch is the one width that runner and dispatcher hold. A batch of one request gets a graph of exactly its tokens.
    """
    dispatcher, longest = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
    widths = sorted({1 + length for length in lengths if longest % (1 + length) == 0} - {longest})
    initialize, warm_up = dispatcher.initialize_cudagraph_keys, runner._warmup_and_capture
    determine = runner._determine_batch_execution_and_padding

    @contextmanager
    def set_width(width: int) -> Iterator[None]:
        runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = width
        try:
            yield
        finally:
            runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = longest

    def initialize_cudagraph_keys(mode: CUDAGraphMode, width: int = 1) -> None:
        separate = mode.decode_mode() == type(mode).FULL and mode.separate_routine()
        if separate:
            _add_sizes_below(dispatcher, widths)
        initialize(mode, width)
        for other in widths if separate else ():  # else one set of graphs for all widths, or none
            with set_width(other):
                _add_keys(dispatcher, type(mode).FULL, other)

    def warmup_and_capture(desc: BatchDescriptor, *args: object, **kwargs: object) -> object:
        if not desc.uniform:
            return warm_up(desc, *args, **kwargs)
        with set_width(desc.num_tokens // desc.num_reqs):
            return warm_up(desc, *args, **kwargs)

    def determine_batch(*args: object, **kwargs: Any) -> object:
        width, tokens, requests = kwargs["max_num_scheduled_tokens"], kwargs["num_tokens"], kwargs["num_reqs"]
        capturing = kwargs.get("force_uniform_decode") is not None
        if capturing or width not in widths or tokens != width * requests:
            return determine(*args, **kwargs)
        with set_width(width):
            return determine(*args, **kwargs)

    dispatcher.initialize_cudagraph_keys = initialize_cudagraph_keys
    runner._warmup_and_capture = warmup_and_capture
    runner._determine_batch_execution_and_padding = determine_batch
    logger.info("FULL CUDA graphs are captured for %s tokens a request, besides %d.", widths, longest)


def _add_sizes_below(dispatcher: CudagraphDispatcher, widths: Sequence[int]) -> None:
    """Also capture graphs for a batch of one request, of every width that divides the next."""
    compilation = dispatcher.compilation_config
    if not compilation.pass_config.enable_sp:  # which needs multiples of the shards
        small = [size for size in widths if all(size % width == 0 for width in widths if width < size)]
        compilation.cudagraph_capture_sizes = sorted({*compilation.cudagraph_capture_sizes, *small})


def _add_keys(dispatcher: CudagraphDispatcher, full: CUDAGraphMode, width: int) -> None:
    """Have graphs captured for batches in which every request has `width` tokens."""
    most = width * dispatcher.vllm_config.scheduler_config.max_num_seqs
    for size in dispatcher.compilation_config.cudagraph_capture_sizes:
        if width <= size <= most and size % width == 0:
            for loras in dispatcher._get_lora_cases():
                key = dispatcher._create_padded_batch_descriptor(size, True, loras > 0, loras)
                dispatcher.add_cudagraph_key(full, key)
