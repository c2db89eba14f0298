"""Page-locked memory: a call that CUDA refuses costs speed, and no kernel that anybody launches later."""

import gc

import pytest
import torch
from torch.overrides import TorchFunctionMode

from verl_tlt.drafter.memory import BLOCK, LockedPool, page_locked


class Runtime(TorchFunctionMode):
    """CUDA's runtime as far as its last error goes: a refused call sets it, the next launch raises and clears it."""

    def __init__(self, *refuses):
        super().__init__()
        self.refuses, self.last, self.locked = refuses, 0, 0

    def _call(self, name, locks):
        if name in self.refuses:
            self.last = 1
            return 1
        self.locked += locks
        return 0

    def cudaHostRegister(self, address, nbytes, flags):
        return self._call("register", 1)

    def cudaHostUnregister(self, address):
        return self._call("unregister", -1)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("device", None) == "cuda":
            error, self.last = self.last, 0
            if error:
                raise RuntimeError("CUDA error: invalid argument")
        return func(*args, **kwargs)


@pytest.fixture
def runtime(monkeypatch, request):
    made = Runtime(*request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    with made:
        yield made


@pytest.mark.parametrize("runtime", [(), ("register",), ("unregister",)], indirect=True)
def test_a_refusal_is_no_error_of_the_next_kernel(runtime, said):
    block = page_locked(1 << 20)
    torch.zeros(4, device="cuda")
    block.fill_(7)
    assert block.shape == (1 << 20,) and ("could not be page-locked" in said.text) is ("register" in runtime.refuses)
    del block
    gc.collect()
    torch.zeros(4, device="cuda")
    assert runtime.locked == ("unregister" in runtime.refuses)


def test_pieces_of_a_pool_lie_apart_and_the_next_steps_take_their_places():
    pool, shapes = LockedPool(), [(4, 1000, 64), (4, 3, 64), (4, 200_000, 96), (4, 77, 64)]
    for step in range(4):
        pool.reset()
        taken = [pool.take(shape, torch.bfloat16) for shape in shapes]
        for number, piece in enumerate(taken):
            piece.fill_(number + step)
        assert all((piece == number + step).all() for number, piece in enumerate(taken)), "they overlap"
        assert [tuple(piece.shape) for piece in taken] == shapes
    needed = sum(piece.nbytes for piece in taken)
    assert needed < sum(map(len, pool._blocks)) <= needed + BLOCK, (
        "no power of two of each, and nothing more after the first step"
    )
