"""CPU versions of the `torch.cuda` calls in verl's Megatron engine and megatron-core.

They allocate on `torch.cuda.current_device()`, write "cuda" literally and compare types with CUDA's names. None of that
is a defect that upstream would mend. So this stands in for the hardware, in a process that holds such an engine, and
only while the engine's own methods run.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def answer_for_cuda() -> None:
    """Give `torch.cuda` in this process the little that megatron-core asks of it apart from tensors' devices."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = rng_state
    cuda.set_rng_state = set_rng_state
    cuda.synchronize = lambda *_: None
    cuda.Stream, cuda.stream, cuda.current_stream = Stream, torch.cpu.stream, torch.cpu.current_stream


class Stream:
    """Work is done when it is asked for: nothing has to wait, and every event has happened."""

    def wait_stream(self, _other: Any) -> None:
        """Return at once."""

    def record_event(self) -> torch.cpu.Event:
        """One that has happened."""
        return torch.cpu.Event()


def rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """The CPU's random state, whichever device's was asked for."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Set the CPU's random state, whichever device's was meant."""
    torch.set_rng_state(state)


def as_on_host(tensor: Any, as_numpy: bool = False, **_others: Any) -> Any:
    """What becomes of a tensor that is moved from its device, as an array where that is asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class CudaIsCpu(TorchFunctionMode):
    """What is made on "cuda", pinned for it or sent there stays on the CPU, and its type has the name of CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; see `torch.overrides.TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # asked for, not converted
            name = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, with CUDA meaning the CPU while it runs."""

    @functools.wraps(method)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with CudaIsCpu():
            return method(*args, **kwargs)

    return inner


def drawn_on_cpu(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; CUDA means the CPU while one is made, not while whoever asked for it works with it."""
    draw = on_cpu(lambda: next(items, items))
    while (item := draw()) is not items:
        yield item
