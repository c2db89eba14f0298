"""CPU stand-in for vLLM's CuMem allocator: memory is unmapped during sleep and holds garbage after waking.

On a GPU vLLM allocates weights and KV cache in a pool. `sleep` unmaps it, so that touching it is an illegal access,
which ends the engine; `wake_up` maps other pages there, whose content is whatever they hold. Stock vLLM's CPU worker
keeps everything, so that code which touches memory too early, or counts on what it held, passes every test. Here each
tensor of the pool lies in a mapping of its own: asleep it cannot be touched (SIGSEGV), awake again it holds garbage.

torch's CPU allocator cannot be replaced from Python. So tensors are moved once they are there: storage by storage, with
all Python tensors that look at one, so that tied weights and views stay tied.
"""

import ctypes
import faulthandler
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

WEIGHTS = "weights"
"""vLLM's tag of what level 1 saves to the host."""
NAN, HUGE = b"\xff", b"\x7b"
"""Every byte of weights and of a KV cache after waking. The former is NaN in all floating-point formats, the latter a
number (6e4 in float16, 1e36 in bfloat16 and float32): vLLM's CPU attention multiplies what lies beyond a sequence by
zero, so that NaN there would be in the tokens of an engine without a drafter too."""
_PAGES = 1 << 24
"""Bytes of the file that garbage is mapped from: a region shows it again and again until it is written."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ_WRITE, _NONE, _MAP_FIXED = mmap.PROT_READ | mmap.PROT_WRITE, 0, 0x10


@dataclass
class _Region:
    """One storage of the pool."""

    tag: str
    address: int
    size: int
    alive: weakref.ref[mmap.mmap]
    """Dead once no tensor looks at the storage: then it is unmapped."""
    saved: torch.Tensor | None = None
    """What level 1 keeps on the host, uint8 [size]."""
    asleep: bool = False


class SleepMemory:
    """The `MemAllocator` (vllm/device_allocator/__init__.py) that vLLM's `Worker.sleep` and `wake_up` call."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._garbage: dict[bytes, int] = {}

    @contextmanager
    def use_memory_pool(
        self, tag: str | None = None, chosen: Callable[[], Iterable[torch.Tensor]] | None = None
    ) -> Iterator[None]:
        """Move into the pool what is allocated inside.

        Args:
            tag: vLLM's, by which it is woken.
            chosen: called at the end, gives those tensors that are to be moved; None: all new ones. The host and the
                device are one here, so what a GPU would have on its host has to be left out by name; but for what NumPy
                looks at, which cannot be on a device.
        """
        before = _storages()  # which stay alive, so that no new one gets the address of an old one
        with _seen_by_numpy() as on_host:
            yield
        wanted = _storages().keys() - before.keys()
        if chosen is not None:
            wanted = {tensor.untyped_storage().data_ptr() for tensor in chosen()}
        wanted -= {address for storage, address in on_host if not storage.expired()}
        del before
        for address, tensors in _storages().items():
            if address in wanted:
                self._move(tensors, tag or "default")

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Take all memory away, after saving what bears one of the tags."""
        tags = (offload_tags,) if isinstance(offload_tags, str) else offload_tags or ()
        for region in self._living():
            if not region.asleep:
                self._drop(region, region.tag in tags)

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Take away what bears one of the tags, without saving it."""
        for region in self._living():
            if not region.asleep and region.tag in ((tags,) if isinstance(tags, str) else tags):
                self._drop(region, save=False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give back what bears one of the tags (None: all): as it was saved, or garbage."""
        for region in self._living():
            if region.asleep and (tags is None or region.tag in tags):
                _check(_libc.mprotect(region.address, region.size, _READ_WRITE))
                region.asleep = False
                if region.saved is not None:
                    ctypes.memmove(region.address, region.saved.data_ptr(), region.size)
                    region.saved = None

    def get_current_usage(self) -> int:
        """Bytes that are mapped; asleep ones are not."""
        return sum(region.size for region in self._living() if not region.asleep)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes as the worker counts them before and after a sleep."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total - self.get_current_usage(), total

    def _living(self) -> list[_Region]:
        self._regions = [region for region in self._regions if region.alive() is not None]
        return self._regions

    def _move(self, tensors: list[torch.Tensor], tag: str) -> None:
        old = tensors[0].untyped_storage()
        size = old.nbytes()
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        new = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        if tag == WEIGHTS:  # a KV cache is all zeros, as a new mapping is
            new.copy_(old)
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
        seen: Any = StorageWeakRef(old)  # type: ignore[no-untyped-call]
        del old
        if not seen.expired():
            raise RuntimeError(f"Something besides Python's tensors looks at one of the {tag}, {size} bytes.")
        self._regions.append(_Region(tag, new.data_ptr(), size, weakref.ref(mapping)))

    def _drop(self, region: _Region, save: bool) -> None:
        faulthandler.enable()  # so that whoever touches it is named
        if save:
            region.saved = torch.empty(region.size, dtype=torch.uint8)
            ctypes.memmove(region.saved.data_ptr(), region.address, region.size)
        byte = NAN if region.tag == WEIGHTS else HUGE
        if byte not in self._garbage:
            self._garbage[byte] = os.memfd_create("asleep")
            os.write(self._garbage[byte], byte * _PAGES)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        for start in range(0, region.size, _PAGES):
            length = min(_PAGES, region.size - start)
            found = _libc.mmap(region.address + start, length, _NONE, flags, self._garbage[byte], 0)
            _check(0 if found == region.address + start else -1)
        region.asleep = True


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def _seen_by_numpy() -> Iterator[list[tuple[Any, int]]]:
    """Collects the storages, and their addresses, of tensors that become NumPy arrays: these do not follow a move."""
    found: list[tuple[Any, int]] = []
    numpy = torch.Tensor.numpy

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        array = numpy(tensor, *args, **kwargs)
        storage: Any = tensor.untyped_storage()
        found.append((StorageWeakRef(storage), storage.data_ptr()))  # type: ignore[no-untyped-call]
        return array

    with mock.patch.object(torch.Tensor, "numpy", noted):
        yield found


def _storages() -> dict[int, list[torch.Tensor]]:
    """All tensors of this process in ordinary memory, by the address of their storage."""
    found: dict[int, list[torch.Tensor]] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            if thing.device.type == "cpu" and thing.layout is torch.strided and thing.untyped_storage().nbytes():
                found.setdefault(thing.untyped_storage().data_ptr(), []).append(thing)
        except (RuntimeError, NotImplementedError):  # a fake tensor, which has no storage
            continue
    found.pop(0, None)
    return found


POOL = SleepMemory()
"""This process's; vLLM has one engine a process."""
