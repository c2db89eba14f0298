"""The CPU as a verl `Platform`: torch's cpu device, gloo, and Ray's GPU resource counted but not real.

verl asks its platform for everything that differs between accelerators (verl/plugin/platform). Ray is told
`num_gpus=N` although there is none, so verl's placement groups and accelerator ids work unchanged.
"""

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_cpu.placement import device, use_device


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for device calls that have no meaning on a CPU."""


def _resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(*_args: Any) -> tuple[int, int]:
    """(free, total) bytes of this machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_module() -> types.ModuleType:
    """A module with the parts of `torch.cuda` that verl calls on its device module."""
    module = types.ModuleType("torch_cpu_as_accelerator")
    for name in (
        "empty_cache", "init", "ipc_collect", "manual_seed", "manual_seed_all", "reset_peak_memory_stats",
        "set_per_process_memory_fraction", "synchronize",
    ):  # fmt: skip
        setattr(module, name, _nothing)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, _resident_bytes)
    values: dict[str, Any] = {
        "__getattr__": lambda name: getattr(torch.cpu, name),  # streams and events come from torch.cpu
        "device": device,
        "set_device": use_device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "cpu",
        "get_device_capability": lambda *_: (0, 0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "mem_get_info": _memory,
        "get_device_properties": lambda *_: types.SimpleNamespace(
            name="cpu", total_memory=_memory()[1], multi_processor_count=os.cpu_count()
        ),
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module


class PlatformCPU(PlatformBase):
    """See `verl.plugin.platform.platform_base.PlatformBase` for what each method means."""

    _module: types.ModuleType | None = None

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        if PlatformCPU._module is None:
            PlatformCPU._module = _device_module()
        return PlatformCPU._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by detection, only by VERL_PLATFORM

    def current_device(self) -> torch.device:
        # verl hands this to `.to()` and `device=`, where an integer would mean cuda:N.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        use_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory instead of CUDA IPC

    def cudart(self) -> None:
        return None


def register() -> None:
    """Make `VERL_PLATFORM=cpu` known to verl."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
