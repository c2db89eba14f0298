"""A core for each device: a replica's engine and its actor rank compute on one core, as they would on one GPU.

A device is numbered as Ray numbers it; verl names a process's devices in CUDA_VISIBLE_DEVICES. Device i is core i of
those that this machine grants; where there are fewer cores than devices, they are shared in turn. A process that verl
gives no device runs on any core: the driver, the rollout servers and the agent loops.

A training session on a replica runs on that replica's core:

    with get_torch_device().device(index):  # verl.utils.device; on a GPU this is torch.cuda.device
        train()
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES = tuple(sorted(os.sched_getaffinity(0)))
"""Cores of this process before it is given a device."""


def core_of(index: int) -> int:
    """The core of the device that this process calls `index`, of those that verl names or of all of the node."""
    visible = os.environ.get(VISIBLE, "").split(",")
    device_id = int(visible[index]) if visible[0] else index
    return CORES[device_id % len(CORES)]


def use_device(index: int) -> None:
    """Run all threads of this process on the core of its device `index`, and so all that they start."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core_of(index)})


def use_named_device(index: int = 0) -> None:
    """The same where verl names this process's devices; others run on any core, as an engine of a test does."""
    if os.environ.get(VISIBLE):
        use_device(index)


@contextlib.contextmanager
def device(index: int) -> Iterator[None]:
    """Run the calling thread on the core of its process's device `index`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core_of(index)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
