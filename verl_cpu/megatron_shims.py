"""What verl's Megatron engine needs to run on a CPU: stand-ins for CUDA and Transformer Engine, and a defect mended.

Engine, bridge, schedules, optimizer, collectives and checkpoints stay verl's, mbridge's and megatron-core's own. As in
`verl_shims`, each function is applied after the module it changes was imported; nothing here imports megatron-core.
"""

import functools
from typing import Any

import torch
from wrapt import register_post_import_hook

from verl_cpu import unequal_parts
from verl_cpu.megatron_cuda import (
    answer_for_cuda,
    as_on_host,
    drawn_on_cpu,
    on_cpu,
    rng_state,
    set_rng_state,
)

METHODS = (
    "initialize", "forward_backward_batch", "optimizer_step", "optimizer_zero_grad", "to", "save_checkpoint",
    "load_checkpoint",
)  # fmt: skip
"""Of verl's engine, in which tensors are made or moved."""


# Changes verl: verl_cpu/README.md#verls-megatron-engine-allocates-on-the-cpu
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


# Changes megatron-core: verl_cpu/README.md#megatrons-random-states-are-the-cpus
def random_state_of_cpu(module: Any) -> None:
    """Let Megatron's tracker of random states keep the CPU's: it calls torch's private functions for CUDA's."""
    module._get_cuda_rng_state, module._set_cuda_rng_state = rng_state, set_rng_state


# Changes megatron-core: verl_cpu/README.md#megatrons-layers-need-no-transformer-engine
def layers_without_transformer_engine(module: Any) -> None:
    """Build layers from `megatron_layers` where Transformer Engine is not installed."""
    if module.HAVE_TE:
        return
    from verl_cpu import megatron_layers

    module.TESpecProvider, module.TENorm = megatron_layers.LayerProvider, megatron_layers.Norm


# Changes megatron-core: verl_cpu/README.md#tokens-are-routed-to-experts-without-transformer-engine
def router_without_transformer_engine(module: Any) -> None:
    """Have the router find no matrix product of Transformer Engine's, instead of no such name."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


# Changes megatron-core: verl_cpu/README.md#the-token-dispatcher-gets-its-counts-as-numbers
def splits_of_cpu(module: Any) -> None:
    """Let the token dispatcher have its counts as numbers, which it gets of tensors that it moves from a device."""
    module.maybe_move_tensor_to_cpu = as_on_host


# Changes megatron-core: verl_cpu/README.md#float32-parameters-are-loaded-into-the-distributed-optimizer
def load_without_gradients(module: Any) -> None:
    """Load a checkpoint of float32 parameters into the optimizer.

    It copies into views of the model's parameters (with 16 bits it has copies of its own), which torch refuses while
    gradients are recorded.
    """
    optimizer = module.DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = torch.no_grad()(original)


# Changes megatron-core: verl_cpu/README.md#a-checkpoint-is-loaded-before-the-optimizers-first-step
def state_before_the_first_step(module: Any) -> None:
    """Let the distributed optimizer tell its state, which a checkpoint is loaded into, before it has taken a step.

    torch's Adam makes its state in its first step, and megatron-core asks for the one `step` of all parameters.
    """
    if module.HAVE_APEX_OR_TE:
        return
    optimizer = module.DistributedOptimizer
    original = optimizer.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        for param in (param for group in adam.param_groups for param in group["params"]):
            if not adam.state[param]:  # as torch.optim.Adam begins
                moments = {name: torch.zeros_like(param, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[param] = {"step": torch.tensor(0.0), **moments}
        return original(self)

    optimizer.state_dict = state_dict


def register() -> None:
    """Arm everything in this process."""
    register_post_import_hook(engine_on_cpu, "verl.workers.engine.megatron.transformer_impl")
    register_post_import_hook(random_state_of_cpu, "megatron.core.tensor_parallel.random")
    register_post_import_hook(layers_without_transformer_engine, "megatron.core.models.gpt.gpt_layer_specs")
    register_post_import_hook(router_without_transformer_engine, "megatron.core.transformer.moe.moe_utils")
    register_post_import_hook(splits_of_cpu, "megatron.core.transformer.moe.token_dispatcher")
    register_post_import_hook(unequal_parts.mend, "megatron.core.tensor_parallel.mappings")
    register_post_import_hook(load_without_gradients, "megatron.core.optimizer.distrib_optimizer")
    register_post_import_hook(state_before_the_first_step, "megatron.core.optimizer.distrib_optimizer")
