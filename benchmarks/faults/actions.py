"""What a fault does when its function is called; the first argument is the function as it was.

Runs in whichever process is concerned, so everything is imported late.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Original = Callable[..., Any]


def kill(original: Original, *args: Any, **kwargs: Any) -> Any:
    """SIGKILL, as the kernel does it for memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(original: Original, *args: Any, **kwargs: Any) -> Any:
    """SIGSTOP: alive, and answers nobody."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args, **kwargs)


def fail(original: Original, *args: Any, **kwargs: Any) -> Any:
    """An error nobody thought of."""
    raise RuntimeError("a fault was injected")


def sicken(original: Original, *args: Any, **kwargs: Any) -> Any:
    """What CUDA says of every further call of a process once an assertion failed on its device."""
    import torch

    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def hang(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Does not come back, whatever lock it holds."""
    time.sleep(3600)


def exhaust_memory(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Allocates until the process may have no more."""
    import resource

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (256 << 20), before[1]))
    held = []
    try:
        while True:
            held.append(torch.ones(4 << 20))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


def nan_gradient(original: Original, trainer: Any, fed: Any) -> Any:
    """A step whose loss and gradients are NaN."""
    forward = trainer._forward

    def broken(*args: Any) -> Any:
        loss, metrics = forward(*args)
        return loss * float("nan"), metrics

    trainer._forward = broken
    try:
        return original(trainer, fed)
    finally:
        del trainer._forward


def nan_parameter(original: Original, spot: Any) -> Any:
    """What is to be published holds a NaN."""
    spot._approved = {name: value.clone() for name, value in spot._approved.items()}
    next(iter(spot._approved.values())).view(-1)[0] = float("nan")
    return original(spot)


def nan_weights(original: Original, server: Any, drafter: Any) -> Any:
    """What arrives at a server to be staged holds a NaN."""
    import dataclasses

    from safetensors.torch import load, save

    tensors = load(drafter.weights)
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = float("nan")
    return original(server, dataclasses.replace(drafter, weights=save(tensors)))


def nan_live(original: Original, drafter: Any, file: Path) -> Any:
    """A worker's drafter becomes NaN after its file was checked and loaded."""
    original(drafter, file)
    drafter.model.get_parameter("model.fc.weight").data.fill_(float("nan"))


def truncate(original: Original, server: Any, *args: Any) -> Any:
    """Half of the staged file is gone when it is to be loaded."""
    file = server._tlt_dir / "drafter" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    return original(server, *args)


def no_room_in_the_store(original: Original, *args: Any, **kwargs: Any) -> Any:
    """What Ray raises where it cannot keep what an actor returns, neither in memory nor on the disk."""
    import ray

    raise ray.exceptions.ObjectStoreFullError("a fault was injected: the object store is full")


def full_store(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Ray's object store takes nothing more while this function runs."""
    import ray

    put = ray.put

    def refuse(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("a fault was injected: the object store is full")

    ray.put = refuse
    try:
        return original(*args, **kwargs)
    finally:
        ray.put = put


def full_disk(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A file of the checkpoint cannot be written."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def room_for_the_policy(original: Original, step: Path, needed: int, keeps: int) -> Any:
    """The disk could take the drafter, or the policy's next checkpoint, and not both."""
    import shutil

    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=needed)
    try:
        return original(step, needed, 0)
    finally:
        shutil.disk_usage = usage


async def answer_late(original: Original, *args: Any, **kwargs: Any) -> Any:
    """It does what it was asked, and says so when nobody waits for it any more."""
    import asyncio

    found = await original(*args, **kwargs)
    await asyncio.sleep(60)
    return found


def lose_replica(original: Original, watch: Any) -> Any:
    """The balancer forgets a replica while requests are on it."""
    import ray

    servers = watch._servers
    ray.get(servers.balancer.remove_servers.remote([next(iter(servers.replicas))]), timeout=30)
    return original(watch)


def late_request(original: Original, servers: Any, name: str) -> Any:
    """A request is handed to a replica that has just been found idle and is about to be removed."""
    import asyncio
    import threading

    from verl_tlt.server.client import TLTLLMServerClient

    acquired, removed = threading.Event(), threading.Event()

    class Late(TLTLLMServerClient):
        async def _acquire_server(self, request_id: str, **fields: Any) -> Any:
            if acquired.is_set():  # asked again
                return await super()._acquire_server(request_id, **fields)
            handle = await super()._acquire_server(request_id, **fields)
            if handle[0] != name:
                raise RuntimeError(f"the balancer gave {handle[0]}, not the idle {name}")
            acquired.set()
            await asyncio.to_thread(removed.wait, 30)
            return handle

    def send() -> None:
        from omegaconf import OmegaConf

        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
        client = Late(config, load_balancer_handle=servers.balancer)
        sampling = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
        said = "failed"
        with contextlib.suppress(Exception):
            output = asyncio.run(client.generate("late", prompt_ids=[1, 5, 6, 7], sampling_params=sampling))
            said = f"{output.stop_reason} {len(output.token_ids)}"
        (Path(os.environ["TLT_FAULTS"]) / "late-request").write_text(said)

    threading.Thread(target=send, daemon=True).start()
    acquired.wait(30)
    try:
        return original(servers, name)
    finally:
        threading.Timer(0.5, removed.set).start()  # by then the server has been asked whether it may sleep
