"""Compares a drafter's weights to the bit: in memory, in a file, and live in an engine."""

import hashlib

import torch
from safetensors.torch import load_file

from verl_tlt.drafter.tensor_file import stacked

_ORDER = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
"""How vLLM stacks what it stacks along the first dimension."""


def fingerprint(tensors) -> str:
    """A digest over names, types, shapes and bits of all tensors."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def live(engine):
    """The drafter's own parameters, and its buffers, in an in-process engine, by vLLM's names."""
    drafter, policy = engine.live_drafter.model, engine.runner.get_model()
    shared = {id(parameter) for parameter in policy.parameters()}
    own = {name: p for name, p in drafter.named_parameters() if id(p) not in shared}
    return own | {name: b for name, b in drafter.named_buffers() if b.numel()}


def live_fingerprint(engine) -> str:
    return fingerprint(live(engine))


def holds(engine, file, leave_out=()) -> bool:
    """Whether the live drafter has the bits of a safetensors file, cast to the served dtype; `leave_out`: names."""
    parts = {}
    for name, tensor in load_file(file).items():
        if name not in ("t2d", *leave_out):
            parts.setdefault(stacked(name), []).append((name, tensor))
    served = {stacked(name): tensor.detach() for name, tensor in live(engine).items()}
    for group, named in parts.items():
        named.sort(key=lambda item: next((n for part, n in _ORDER.items() if f".{part}." in item[0]), 0))
        whole, found = torch.cat([tensor for _, tensor in named]), served[group]
        if not torch.equal(found[: len(whole)], whole.to(found.dtype)):
            return False
    return True
