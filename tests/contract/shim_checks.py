"""What each CPU shim is for, tried out in this process: `python shim_checks.py shim`, or `stock` to see it missing.

One process tries everything, since importing verl and vLLM takes longer than all checks together; it prints a line of
JSON for each, [name, what was found].
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time

SHIMMED = sys.argv[1:] == ["shim"]


def entry() -> tuple[int, str | None]:
    """(objects between two looks for garbage, where verl looks for its FSDP engine) in such a process."""
    return gc.get_threshold()[0], os.environ.get("VERL_ENGINE_DEVICE")


def expand() -> bool:
    """Whether the rejection sampler's per-token values are those of each token's request."""
    import torch
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel  # as vLLM's CPU model runner does
    out = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([2, 3, 6]), 6, 0, 1)
    return torch.equal(out, torch.tensor([0.5, 0.5, 1.0, 0.25, 0.25, 0.25]))


def linear() -> str:
    """What is left of a linear layer's weight once vLLM has loaded it."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.float32)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    if layer.weight.numel() != 64 * 64:
        return "gone"
    x = torch.randn(2, 64)
    return "right" if torch.allclose(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T) else "wrong"


def backend() -> str:
    """What becomes of a process group whose backend names the CPU twice."""
    import torch.distributed as dist

    try:
        dist.init_process_group(backend="cpu:gloo,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    except ValueError:
        return "ValueError"
    dist.destroy_process_group()
    return "started"


def critic() -> str:
    """Whether a critic loads without flash-attention."""
    import torch
    from transformers import AutoConfig, Qwen3Config, Qwen3ForTokenClassification
    from verl.utils.model import load_valuehead_model

    path = tempfile.mkdtemp()
    Qwen3ForTokenClassification(
        Qwen3Config(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_labels=1,
        )
    ).save_pretrained(path)  # fmt: skip
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


def buckets() -> str:
    """Whether received weights outlive the shared memory they came in. Without the shim the sender waits for ever."""
    import torch
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    kept, handle = [], f"ipc://{tempfile.mkdtemp()}/weights.sock"

    def receive() -> None:
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        try:
            receiver.receive_weights(lambda weights, is_last: kept.extend(weights))
        except BufferError:
            say("buckets", "BufferError")
            os._exit(0)

    thread = threading.Thread(target=receive)
    thread.start()
    sender = transfer.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(sender.async_send_weights(iter([("w", torch.arange(8.0))])))
    thread.join()
    return "kept" if kept[0][1].tolist() == list(range(8)) else "overwritten"


def say(name: str, found: object) -> None:
    """One result, at once."""
    print(json.dumps([name, found]), flush=True)


def main() -> None:
    """Start with the shims, as verl and vLLM do, or without; then try everything, at last what may end the process."""
    import verl  # noqa: F401 - the platform must be known before verl's device modules ask for it

    if SHIMMED:
        import verl_tlt.compat.cpu.entry  # noqa: F401
        from verl_tlt.compat.cpu.vllm_shims import register
    else:
        from verl_tlt.compat.cpu.platform import register  # stock verl knows no platform of that name
    register()
    for check in (entry, expand, linear, backend, critic, queue, buckets):
        say(check.__name__, check())


if __name__ == "__main__":
    main()
