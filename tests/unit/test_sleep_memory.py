"""Memory of the CPU's sleep: lost and untouchable asleep, garbage or what was saved after waking."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

from verl_cpu.sleep_memory import SleepMemory

TOO_EARLY = """
import torch
from verl_cpu.sleep_memory import SleepMemory

memory = SleepMemory()
with memory.use_memory_pool("weights"):
    weight = torch.ones(8)
memory.sleep(("weights",))
memory.wake_up(["kv_cache"])
print("touching", flush=True)
weight.sum()
print("alive")
"""


@pytest.fixture
def memory():
    return SleepMemory()


def test_touching_what_sleeps_ends_the_process_and_names_who_did():
    done = subprocess.run([sys.executable, "-c", TOO_EARLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == -11 and done.stdout.split() == ["touching"]
    line = TOO_EARLY.splitlines().index("weight.sum()") + 1
    assert f'File "<string>", line {line} in <module>' in done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropped_weights_come_back_as_nan_and_a_kv_cache_as_numbers(memory, dtype):
    with memory.use_memory_pool("weights"):
        weight, count = torch.ones(5, 7, dtype=dtype), torch.arange(3)
    with memory.use_memory_pool("kv_cache"):
        cache = torch.zeros(2, 3, dtype=dtype)
    assert weight.eq(1).all() and count.tolist() == [0, 1, 2] and not cache.any()
    memory.sleep(())
    assert memory.get_current_usage() == 0
    memory.wake_up(["weights"])
    assert weight.isnan().all() and count.tolist() == [-1, -1, -1]
    memory.wake_up()
    assert cache.isfinite().all() and cache.gt(1e4).all()


def test_level_1_gives_back_what_was_saved_and_a_second_sleep_forgets_again(memory):
    with memory.use_memory_pool("weights"):
        weight = torch.arange(10_000_000.0)  # more than garbage is kept of
    memory.sleep("weights")
    memory.sleep(())  # asleep already: what was saved stays saved
    memory.wake_up()
    assert torch.equal(weight, torch.arange(10_000_000.0))
    memory.sleep(())
    memory.wake_up()
    assert weight.isnan().all()


def test_what_shared_memory_shares_it_in_the_pool_and_the_rest_is_left_alone(memory):
    outside = torch.ones(4)
    with memory.use_memory_pool("weights"):
        tied = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})
        model["head"].weight = model["embedding"].weight = tied
        row, column = tied[1], tied.T[2]
    with torch.no_grad():
        tied.copy_(torch.arange(16.0).view(4, 4))
    assert row.tolist() == [4, 5, 6, 7] and column.tolist() == [2, 6, 10, 14]
    assert model["head"].weight is model["embedding"].weight and model["head"].weight[3, 3] == 15
    memory.sleep(())
    assert outside.eq(1).all()
    memory.wake_up()
    assert row.isnan().all() and column.isnan().all()


def test_only_the_chosen_ones_and_only_while_somebody_holds_them(memory):
    chosen = []
    with memory.use_memory_pool("kv_cache", lambda: chosen):
        raw = torch.zeros(64, dtype=torch.int8)
        cache, table = raw.view(torch.float32), torch.ones(4)
        chosen.append(cache)
    memory.sleep(())
    assert table.eq(1).all()
    memory.wake_up()
    assert raw.eq(0x7B).all() and memory.get_current_usage() == 64
    chosen.clear()
    del raw, cache
    gc.collect()
    assert memory.get_current_usage() == 0


def test_what_numpy_looks_at_would_be_on_a_gpus_host_and_stays_where_it_is(memory):
    """As the buffers of vLLM's V2 model runner that are written through NumPy."""
    with memory.use_memory_pool("weights"):
        weight, host, other = torch.ones(4), torch.zeros(4), torch.zeros(4)
        seen, also = host.numpy(), np.asarray(other[1:])
        for _ in range(10):
            np.asarray(torch.ones(4))  # gone before the end, and its address may be another's
        later = torch.ones(4)
    seen[:] = also[:] = 3
    memory.sleep(())
    assert host.tolist() == [3, 3, 3, 3] and other.tolist() == [0, 3, 3, 3]
    memory.wake_up()
    assert weight.isnan().all() and later.isnan().all()


def test_a_discarded_tag_is_gone_and_the_others_stay(memory):
    with memory.use_memory_pool("weights"):
        weight = torch.ones(4)
    with memory.use_memory_pool("kv_cache"):
        cache = torch.zeros(4)
    memory.discard("kv_cache")
    assert weight.eq(1).all() and memory.get_current_usage() == 16
    memory.wake_up()
    assert cache.gt(1e4).all()
