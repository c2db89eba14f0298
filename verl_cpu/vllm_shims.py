"""What vLLM's CPU backend needs for RL with speculation, one function each.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It does nothing unless
`VERL_PLATFORM=cpu`, so a GPU installation never sees it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

from wrapt import register_post_import_hook

from verl_cpu.placement import use_named_device

if TYPE_CHECKING:
    import torch

_LOOK_S = 2e-4
"""Seconds between two looks for a message: 1-2 % of the shortest step, at 2-3 % of a core."""


def _plain_linear(layer: Any, remove_weight: bool = False) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


# Changes vllm: verl_cpu/README.md#linear-weights-stay-as-they-were-loaded
def keep_linear_weights(module: Any) -> None:
    """Leave linear weights as they were loaded.

    `dispatch_cpu_unquantized_gemm` repacks them and empties `.weight`, after which no weight sync can load into the
    live model (vllm/model_executor/layers/utils.py; linear.py and vocab_parallel_embedding.py import it at call time).
    """
    module.dispatch_cpu_unquantized_gemm = _plain_linear


# Changes vllm: verl_cpu/README.md#experts-weights-stay-as-they-were-loaded
def keep_expert_weights(module: Any) -> None:
    """Leave experts' weights as they were loaded, and pack them when they are used.

    The CPU backend packs them once after loading, in parameters of the same shape: a weight sync then loads into these
    what is not packed, and the experts compute with shuffled numbers (vllm .../fused_moe/experts/cpu_moe.py).
    """
    experts, pack = module.CPUUnquantizedExperts, module.cpu_prepack_moe_weight
    after_loading, apply = experts.process_weights_after_loading, experts.apply

    @functools.wraps(after_loading)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        loaded = {name: layer.get_parameter(name) for name in ("w13_weight", "w2_weight")}
        after_loading(self, layer)
        if layer.w13_weight.shape != loaded["w13_weight"].shape:
            raise NotImplementedError(
                "On vLLM's CPU backend experts take new weights only where moe_intermediate_size is a multiple of 32."
            )
        for name, weight in loaded.items():
            layer.register_parameter(name, weight)

    @functools.wraps(apply)
    def packed(self: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(self, hidden_states, pack(w1, self.isa), pack(w2, self.isa), *args, **kwargs)

    experts.process_weights_after_loading, experts.apply = process_weights_after_loading, packed


def expand_batch_to_tokens(
    x: torch.Tensor,  # [batch]
    cu_num_tokens: torch.Tensor,  # [batch], cumulative draft counts
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """x[i] for each draft token of request i, `replace_from` turned into `replace_to`: [num_tokens], x's dtype."""
    import torch

    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))  # [batch]
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)  # [num_tokens]
    return expanded.masked_fill(expanded == replace_from, replace_to)


# Changes vllm: verl_cpu/README.md#per-token-sampling-parameters-are-filled-in-the-callers-dtype
def fix_expand_batch(module: Any) -> None:
    """Give the rejection sampler per-token temperature, top-k and top-p that are set.

    The CPU kernel writes into an int64 copy that never returns (vllm/utils/cpu_triton_utils.py), so sampling above
    temperature 0 reads uninitialised memory: wrong distributions, NaN, or an index error.
    """
    module.expand_batch_to_tokens = expand_batch_to_tokens


# Changes vllm: verl_cpu/README.md#a-message-queues-reader-sleeps-between-two-looks
def sleep_between_looks(module: Any) -> None:
    """Let a process that waits for a message sleep a moment between two looks for it.

    `SpinCondition.wait` only yields for a second after each message, and in decoding the next one always comes sooner:
    engine core and worker each keep a core busy while the other computes. Where the cores are the accelerator, that
    time belongs to the model and to the spot trainer. Waiting for the notification instead is no way out: its socket
    holds one message and drops the rest, so a wake-up can be lost while steps follow each other closely
    (vllm/distributed/device_communicators/shm_broadcast.py).
    """
    original = module.SpinCondition.wait

    @functools.wraps(original)
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(_LOOK_S)
        else:
            original(self, timeout_ms)

    module.SpinCondition.wait = wait


# Changes vllm: verl_cpu/README.md#an-engine-may-be-started-with-sleep-mode
def sleep_is_available(module: Any) -> None:
    """Let an engine on the CPU be started with sleep mode, as verl starts it by default."""
    module.CpuPlatform.is_sleep_mode_available = lambda self: True


# Changes vllm: verl_cpu/README.md#sleep-takes-weights-and-kv-cache-away
def sleep_as_on_a_gpu(module: Any) -> None:
    """Let the CPU's worker do what the GPU's does when it sleeps and wakes, in memory that can be taken away.

    What is saved, dropped and restored is decided by the installed release's own code (`Worker.sleep` and `wake_up` in
    vllm/v1/worker/gpu_worker.py): at level 2 the policy's buffers are kept, and from 0.28 on the drafter's.
    """
    import vllm.device_allocator
    from vllm.v1.worker import gpu_worker

    from verl_cpu.sleep_memory import POOL, WEIGHTS

    def sleep(self: Any, level: int = 1) -> None:
        import torch

        counted = mock.patch.object(torch.accelerator, "get_memory_info", POOL.memory_info, create=True)
        with counted, mock.patch.object(torch.cuda, "mem_get_info", POOL.memory_info):  # the latter in 0.24
            gpu_worker.Worker.sleep(self, level)

    def memory_pool(self: Any, tag: str) -> AbstractContextManager[None]:
        lost = (WEIGHTS, "kv_cache")  # around the latter 0.32 has the pool "runtime", which every sleep saves
        if tag not in lost or not self.vllm_config.model_config.enable_sleep_mode:
            return nullcontext()
        layers = self.vllm_config.compilation_config.static_forward_context

        def caches() -> Iterator[torch.Tensor]:
            for layer in layers.values():
                found = getattr(layer, "kv_cache", None)
                yield from found if isinstance(found, list | tuple) else () if found is None else (found,)

        return POOL.use_memory_pool(tag, None if tag == WEIGHTS else caches)

    for place in (vllm.device_allocator, gpu_worker):
        place.get_mem_allocator_instance = lambda: POOL
    module.CPUWorker.sleep, module.CPUWorker.wake_up = sleep, gpu_worker.Worker.wake_up
    module.CPUWorker._maybe_get_memory_pool_context = memory_pool


# Changes vllm: verl_cpu/README.md#an-engine-runs-on-the-core-of-its-replica
def place_workers(module: Any) -> None:
    """Run a worker of one of verl's engines on the core that is its device."""
    original = module.CPUWorker.init_device

    @functools.wraps(original)
    def init_device(self: Any) -> None:
        use_named_device(self.local_rank)
        original(self)

    module.CPUWorker.init_device = init_device


# Changes vllm: verl_cpu/README.md#linear-attention-verifies-drafts-of-any-length
def convolve_any_draft(module: Any) -> None:
    """Let a layer of linear attention verify drafts of any length.

    Its convolution keeps what it has seen in a buffer that `_spec_forward` fills from the end, with the longest draft
    in mind: after a shorter one the next step reads beside it (vllm .../mamba/ops/cpu/gdn_attention.py). The Triton
    kernel fills it from the beginning, whatever the length.
    """
    if "state_len - q_i" not in inspect.getsource(module):
        return

    @functools.wraps(module._spec_forward)
    def spec_forward(
        layer: Any, meta: Any, mixed: Any, b: Any, a: Any, conv_buf: Any, ssm_state: Any, width: int, _state_len: int
    ) -> Any:
        import torch
        import vllm._custom_ops as ops

        starts = meta.spec_query_start_loc[: meta.num_spec_decodes + 1]
        slots = meta.spec_state_indices_tensor[: meta.num_spec_decodes]
        accepted = meta.num_accepted_tokens[: meta.num_spec_decodes]
        weight, convolved = module._unpacked_conv_weight(layer).float(), torch.empty_like(mixed)  # [channels, width]
        for slot, at, (first, end) in zip(
            slots[:, 0].tolist(), accepted.tolist(), itertools.pairwise(starts.tolist()), strict=True
        ):
            buffer = conv_buf[slot]  # [channels, width - 1 + K_max]: width - 2 tokens before the step's, then those
            known, new = buffer[:, at - 1 : at + width - 2], mixed[first:end].T.to(buffer.dtype)
            seen = torch.cat([known, new], dim=1)  # [channels, width - 1 + tokens]
            # torch's conv1d takes milliseconds for these few numbers in 16 bits.
            y = torch.einsum("ctw,cw->ct", seen.float().unfold(1, width, 1), weight)
            y = (y if layer.conv1d.bias is None else y + layer.conv1d.bias[:, None]).to(seen.dtype)
            convolved[first:end] = (torch.nn.functional.silu(y) if layer.activation == "silu" else y).T.to(mixed.dtype)
            buffer[:, : seen.shape[1] - 1] = seen[:, 1:]
        q, k, v = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(convolved))
        slots, accepted, starts = (part.to(torch.int32).contiguous() for part in (slots, accepted, starts))
        return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            A_log=layer.A_log, dt_bias=layer.dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=ssm_state,
            spec_state_indices=slots, num_accepted_tokens=accepted, cu_seqlens=starts, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    module._spec_forward = spec_forward


def register() -> None:
    """Arm every shim in this process, on the CPU platform only."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    register_post_import_hook(keep_linear_weights, "vllm.model_executor.layers.utils")
    register_post_import_hook(keep_expert_weights, "vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    register_post_import_hook(convolve_any_draft, "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    register_post_import_hook(fix_expand_batch, "vllm.v1.sample.rejection_sampler")
    register_post_import_hook(sleep_between_looks, "vllm.distributed.device_communicators.shm_broadcast")
    register_post_import_hook(sleep_is_available, "vllm.platforms.cpu")
    register_post_import_hook(sleep_as_on_a_gpu, "vllm.v1.worker.cpu_worker")
    register_post_import_hook(place_workers, "vllm.v1.worker.cpu_worker")
