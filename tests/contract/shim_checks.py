"""What each CPU shim is for, tried out in this process: `python shim_checks.py shim`, or `stock` to see it missing.

One process tries everything, since importing verl and vLLM takes longer than all checks together; it prints a line of
JSON for each, [name, what was found].
"""

import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

SHIMMED = sys.argv[1:] == ["shim"]


def entry() -> tuple[int, str | None]:
    """(objects between two looks for garbage, where verl looks for its FSDP engine) in such a process."""
    return gc.get_threshold()[0], os.environ.get("VERL_ENGINE_DEVICE")


def linear() -> str:
    """What is left of a linear layer's weight once vLLM has loaded it."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.float32)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    if layer.weight.numel() != 64 * 64:
        return "gone"
    x = torch.randn(2, 64)
    return "right" if torch.allclose(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T) else "wrong"


def experts() -> str:
    """What is left of the weights of a mixture's experts once vLLM has loaded them, and whether they are used."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    config = SimpleNamespace(activation=MoEActivation.SILU, intermediate_size_per_partition=32, experts_per_token=1)
    cpu = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    cpu.moe_config, cpu.quant_config = config, SimpleNamespace(w1_bias=None, w2_bias=None)
    layer = torch.nn.Module()
    layer.use_grouped_topk, layer.renormalize, layer.scoring_func = False, True, "softmax"
    layer.custom_routing_function = None
    w1, w2 = torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w.clone(), requires_grad=False) for w in (w1, w2))
    cpu.process_weights_after_loading(layer)
    if not torch.equal(layer.w13_weight, w1):
        return "packed"
    x, chosen = torch.randn(3, 32), torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    out = cpu.apply(x, layer.w13_weight, layer.w2_weight, chosen, MoEActivation.SILU, 2, None, None, False)
    for row, expert, got in zip(x, chosen.argmax(-1), out, strict=True):
        gate, up = (w1[expert] @ row).chunk(2)
        if not torch.allclose(got, w2[expert] @ (torch.nn.functional.silu(gate) * up), rtol=1e-3, atol=1e-3):
            return "wrong"
    return "right"


def backend() -> str:
    """What becomes of a process group whose backend names the CPU twice."""
    try:
        dist.init_process_group(backend="cpu:gloo,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    except ValueError:
        return "ValueError"
    dist.destroy_process_group()
    return "started"


def critic() -> str:
    """Whether a critic loads without flash-attention."""
    from transformers import AutoConfig, Qwen3Config, Qwen3ForTokenClassification
    from verl.utils.model import load_valuehead_model

    path = tempfile.mkdtemp()
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    made = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, num_labels=1)
    Qwen3ForTokenClassification(made).save_pretrained(path)
    config = AutoConfig.from_pretrained(path, attn_implementation="sdpa")
    try:
        model = load_valuehead_model(path, torch.float32, config, False)
    except RuntimeError as error:
        return "no value head" if "value head" in str(error) else str(error)
    return f"{model(torch.tensor([[1, 2, 3]])).logits.shape[-1]} value"


def queue() -> tuple[list[str], bool]:
    """(what a reader got, whether it slept while it waited): by its own going to sleep, which no load changes."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer, got, slept = MessageQueue(1, 1), [], []

    def read() -> None:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        reader.wait_until_ready()
        got.append(reader.dequeue(timeout=300))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        got.append(reader.dequeue(timeout=300))
        slept.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    writer.enqueue("one")
    time.sleep(0.5)  # shorter than the second for which stock looks for the next message
    writer.enqueue("two")
    thread.join()
    print(slept, file=sys.stderr)
    return got, slept[0] > 20


def sleep() -> tuple[bool, str, str]:
    """(whether sleep mode may be asked for, what a worker's weights and its buffers are after level 2)."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
    from vllm.v1.worker.cpu_worker import CPUWorker

    _set_torch_accelerator_to_noop()
    worker = CPUWorker.__new__(CPUWorker)
    asked = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
    worker.vllm_config = SimpleNamespace(
        model_config=asked, compilation_config=SimpleNamespace(static_forward_context={})
    )
    worker._sleep_mode_backend, worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = None, {}, {}
    with worker._maybe_get_memory_pool_context("weights"):
        model = torch.nn.Linear(4, 4)
        model.register_buffer("table", torch.ones(4))
    worker.model_runner = SimpleNamespace(model=model, get_draft_model=lambda: None, post_kv_cache_wake_up=lambda: None)
    worker.sleep(level=2)
    worker.wake_up(["weights"])
    worker.wake_up(["kv_cache"])
    said = ["NaN" if tensor.isnan().all() else "kept" for tensor in (model.weight, model.table)]
    return CpuPlatform().is_sleep_mode_available(), *said


def megatron_layers() -> str:
    """What megatron-core makes a layer of where it would take Transformer Engine's parts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    try:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    except NameError as error:
        return str(error)
    return layer.submodules.self_attention.submodules.core_attention.__name__


def megatron_router() -> str:
    """What a router of experts says of one token."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    try:
        return f"{router_gating_linear(torch.ones(1, 2), torch.ones(4, 2), None, torch.float32).sum():.0f}"
    except NameError as error:
        return str(error)


def megatron_fresh() -> str:
    """What Megatron's optimizer holds before its first step, for a checkpoint to be loaded into."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    try:
        state = DistributedOptimizer.state_dict(SimpleNamespace(optimizer=adam, grad_scaler=None))
    except AssertionError:
        return "no step"
    return f"step {state['optimizer']['param_groups'][0]['step']:.0f}"


def megatron_random() -> str:
    """Whether megatron-core's tracker of random states works without CUDA, given what else asks torch.cuda."""
    from megatron.core.tensor_parallel import random

    state = torch.get_rng_state()
    try:
        random._set_cuda_rng_state(state)
        return "the CPU's" if torch.equal(random._get_cuda_rng_state(), state) else "another"
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__


def megatron_engine() -> str:
    """How far verl's Megatron engine comes with a policy of 3 MB in one process."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    policy = Path(__file__).parents[2] / "tests" / "toy" / "policy"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = MegatronEngineWithLMHead(
            HFModelConfig(path=str(policy)), McoreEngineConfig(vanilla_mbridge=True),
            McoreOptimizerConfig(lr=1e-3, total_training_steps=1), CheckpointConfig(),
        )  # fmt: skip
        engine.initialize()
    except AssertionError as error:
        return str(error)
    return f"{len(dict(engine.get_per_tensor_param()[0]))} tensors"


def say(name: str, found: object) -> None:
    """One result, at once."""
    print(json.dumps([name, found]), flush=True)


def main() -> None:
    """Start with the shims, as verl and vLLM do, or without; then try everything, at last what may end the process."""
    import verl  # noqa: F401 - the platform must be known before verl's device modules ask for it

    if SHIMMED:
        import verl_cpu.entry  # noqa: F401
        from verl_cpu.vllm_shims import register
    else:
        from verl_cpu.platform import register  # stock verl knows no platform of that name
    register()
    megatron = megatron_layers, megatron_router, megatron_fresh, megatron_random, megatron_engine
    for check in (entry, linear, experts, backend, critic, queue, sleep, *megatron):
        say(check.__name__, check())


if __name__ == "__main__":
    main()
