"""Import before vLLM in a process of its own: its Triton kernels run in Triton's interpreter, where there is no GPU."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
from triton.backends import backends
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

backends["cpu"] = SimpleNamespace(driver=None, compiler=None)  # else vLLM's CPU backend sees no Triton
libdevice.log1p = lambda x: tl.log(x + 1.0)  # the interpreter has none
torch.Tensor.record_stream = lambda *_: None  # vLLM's CPU backend has a stand-in for every other use of a stream


def masked(access, at):
    """The interpreter's own, for masks that NumPy made numbers of."""

    def run(builder, *args):
        mask = args[at]
        args = (*args[:at], TensorHandle(mask.data.astype(bool), mask.dtype), *args[at + 1 :])
        return access(builder, *args)

    return run


InterpreterBuilder.create_masked_load = masked(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = masked(InterpreterBuilder.create_masked_store, 2)


def narrow(execute):
    """The interpreter's own, with kernels that read hardly more than the vocabulary: it computes what they mask too.

    Something is always masked, for NumPy has no argmax of numbers that are all NaN.
    """

    def run(executor, *args, **kwargs):
        vocab = dict(zip(executor.arg_names, args, strict=False)).get("vocab_size")
        if vocab is not None and kwargs.get("BLOCK_SIZE", 0) > vocab:
            kwargs["BLOCK_SIZE"] = max(32, 1 << vocab.bit_length())  # 32: of a grammar's bits
        return execute(executor, *args, **kwargs)

    return run


GridExecutor.__call__ = narrow(GridExecutor.__call__)


def patch_once(patch):
    """The interpreter's own, once and for good: it patches `triton.language` with each call of a device function."""
    done: set[int] = set()

    def run(fn):
        scope = interpreter._LangPatchScope() if id(fn.__globals__) in done else patch(fn)
        done.add(id(fn.__globals__))
        scope._changes.clear()  # nothing to restore
        return scope

    return run


interpreter._patch_lang = patch_once(interpreter._patch_lang)
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # as on a GPU
