"""Each CPU shim does what it says, and stock still needs it: a test here fails once upstream has caught up."""

import os
import subprocess
import sys
import textwrap

import pytest

# Both halves run in fresh processes: a shim, once applied, stays. Plugins are off, so a process has what it asks for.
WITH_AND_WITHOUT = [pytest.param(True, id="shim"), pytest.param(False, id="stock")]


def run(code: str, shimmed: bool, platform: str = "cpu") -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VERL_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_PLATFORM": platform,
        "SHIM": "1" if shimmed else "",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


EXPAND = """
    import os, torch
    if os.environ["SHIM"]:
        from verl_tlt.compat.cpu import vllm_shims
        vllm_shims.register()
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel  # as vLLM's CPU model runner does
    out = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([2, 3, 6]), 6, 0, 1)
    print(torch.equal(out, torch.tensor([0.5, 0.5, 1.0, 0.25, 0.25, 0.25])))
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_expand_batch_is_right_only_with_the_shim(shimmed):
    assert run(EXPAND, shimmed) == str(shimmed)


LINEAR = """
    import os, torch
    if os.environ["SHIM"]:
        from verl_tlt.compat.cpu import vllm_shims
        vllm_shims.register()
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.float32)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    x = torch.randn(2, 64)
    print(layer.weight.numel() == 64 * 64, torch.allclose(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)
          if layer.weight.numel() else "gone")
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_linear_weights_survive_loading_only_with_the_shim(shimmed):
    assert run(LINEAR, shimmed) == ("True True" if shimmed else "False gone")


BACKEND = """
    import os
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    if os.environ["SHIM"]:
        import verl_tlt.compat.cpu.verl_shims as shims
        shims.register()
    import torch.distributed as dist
    store = dist.HashStore()
    try:
        dist.init_process_group(backend="cpu:gloo,cpu:gloo", store=store, rank=0, world_size=1)
        print("started")
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_a_backend_that_names_the_cpu_twice_starts_only_with_the_shim(shimmed):
    assert run(BACKEND, shimmed) == ("started" if shimmed else "ValueError")


BUCKETS = """
    import asyncio, os, tempfile, threading
    import verl  # the platform must be known before verl's device modules ask for it
    from verl_tlt.compat.cpu import platform as cpu, verl_shims
    cpu.register()
    if os.environ["SHIM"]:
        verl_shims.register()
    import torch
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
    kept, handle = [], f"ipc://{tempfile.mkdtemp()}/weights.sock"
    def receive():
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        try:
            receiver.receive_weights(lambda weights, is_last: kept.extend(weights))
        except BufferError:
            print("BufferError", flush=True)
            os._exit(0)
    thread = threading.Thread(target=receive)
    thread.start()
    sender = transfer.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(sender.async_send_weights(iter([("w", torch.arange(8.0))])))
    thread.join()
    print(kept[0][1].tolist() == list(range(8)))
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_received_weights_outlive_their_shared_memory_only_with_the_shim(shimmed):
    assert run(BUCKETS, shimmed) == ("True" if shimmed else "BufferError")


CRITIC = """
    import os, tempfile
    import verl
    from verl_tlt.compat.cpu import platform as cpu, verl_shims
    cpu.register()
    if os.environ["SHIM"]:
        verl_shims.register()
    import torch
    from transformers import AutoConfig, Qwen3Config, Qwen3ForTokenClassification
    from verl.utils.model import load_valuehead_model
    path = tempfile.mkdtemp()
    Qwen3ForTokenClassification(Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_labels=1,
    )).save_pretrained(path)
    config = AutoConfig.from_pretrained(path, attn_implementation="sdpa")
    try:
        model = load_valuehead_model(path, torch.float32, config, False)
        print(model(torch.tensor([[1, 2, 3]])).logits.shape[-1])
    except RuntimeError as error:
        print("no value head" if "value head" in str(error) else error)
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_a_critic_loads_without_flash_attention_only_with_the_shim(shimmed):
    assert run(CRITIC, shimmed) == ("1" if shimmed else "no value head")


QUEUE = """
    import os, threading, time
    if os.environ["SHIM"]:
        from verl_tlt.compat.cpu import vllm_shims
        vllm_shims.register()
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    writer = MessageQueue(1, 1)
    got = []
    def read():
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        reader.wait_until_ready()
        got.append(reader.dequeue(timeout=300))
        before = time.thread_time()
        got.append(reader.dequeue(timeout=300))
        got.append(time.thread_time() - before)
    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    writer.enqueue("one")
    time.sleep(0.5)  # shorter than the second for which stock looks for the next message
    writer.enqueue("two")
    thread.join()
    print(*got[:2], "slept" if got[2] < 0.1 else "spun")
"""


@pytest.mark.parametrize("shimmed", WITH_AND_WITHOUT)
def test_a_reader_sleeps_between_looks_only_with_the_shim(shimmed):
    assert run(QUEUE, shimmed) == ("one two slept" if shimmed else "one two spun")
