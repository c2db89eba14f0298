"""What verl's Megatron engine needs to run on a CPU: stand-ins for CUDA and Transformer Engine, and a defect mended.

Engine, bridge, schedules, optimizer, collectives and checkpoints stay verl's, mbridge's and megatron-core's own. As in
`verl_shims`, each function is applied after the module it changes was imported; nothing here imports megatron-core.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from verl_tlt.compat.cpu.megatron_cuda import answer_for_cuda, drawn_on_cpu, on_cpu, rng_state, set_rng_state
from verl_tlt.compat.import_hooks import when_imported

METHODS = (
    "initialize", "forward_backward_batch", "optimizer_step", "optimizer_zero_grad", "to", "save_checkpoint",
    "load_checkpoint",
)  # fmt: skip
"""Of verl's engine, in which tensors are made or moved."""


def engine_on_cpu(module: Any) -> None:
    """Let CUDA mean the CPU while the engine's own methods run, in a process that has such an engine."""
    engine = module.MegatronEngine
    start, export = engine.__init__, engine.get_per_tensor_param

    @functools.wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        answer_for_cuda()
        on_cpu(start)(self, *args, **kwargs)

    @functools.wraps(export)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        params, peft = on_cpu(export)(self, *args, **kwargs)
        return drawn_on_cpu(iter(params)), peft

    engine.__init__, engine.get_per_tensor_param = __init__, get_per_tensor_param
    for name in METHODS:
        setattr(engine, name, on_cpu(getattr(engine, name)))


def random_state_of_cpu(module: Any) -> None:
    """Let Megatron's tracker of random states keep the CPU's: it calls torch's private functions for CUDA's."""
    module._get_cuda_rng_state, module._set_cuda_rng_state = rng_state, set_rng_state


def layers_without_transformer_engine(module: Any) -> None:
    """Build layers from `megatron_layers` where Transformer Engine is not installed."""
    if module.HAVE_TE:
        return
    from verl_tlt.compat.cpu import megatron_layers

    module.TESpecProvider, module.TENorm = megatron_layers.LayerProvider, megatron_layers.Norm


def load_without_gradients(module: Any) -> None:
    """Load a checkpoint of float32 parameters into the optimizer.

    It copies into views of the model's parameters (with 16 bits it has copies of its own), which torch refuses while
    gradients are recorded.
    """
    optimizer = module.DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states
    if "no_grad" not in inspect.getsource(original):  # patches/megatron-core/0001 is not in
        optimizer._set_main_param_and_optimizer_states = torch.no_grad()(original)


def register() -> None:
    """Arm everything in this process."""
    when_imported("verl.workers.engine.megatron.transformer_impl", engine_on_cpu)
    when_imported("megatron.core.tensor_parallel.random", random_state_of_cpu)
    when_imported("megatron.core.models.gpt.gpt_layer_specs", layers_without_transformer_engine)
    when_imported("megatron.core.optimizer.distrib_optimizer", load_without_gradients)
