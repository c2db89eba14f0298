"""Which errors leave a process unable to use its device; the ending itself on a Ray worker in test_fleet.py."""

import subprocess
import sys

import pytest
import torch
from torch.distributed import DistBackendError

from verl_tlt.errors import TLTError
from verl_tlt.spot_worker.worker import ending_with_its_device, spoils_device

HINT = "\nSearch for `cudaError' in https://docs.nvidia.com. CUDA kernel errors might be reported asynchronously.\n"
ASSERTION = torch.AcceleratorError("CUDA error: device-side assert triggered" + HINT)
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB.")


def raised(error, cause=None, during=None, hides=False):
    """The error as it arrives: raised from a cause, or while another one was handled (`hides`: `from None`)."""
    error.__cause__, error.__context__, error.__suppress_context__ = cause, during, hides or cause is not None
    return error


def said(*messages):
    return [RuntimeError(message) for message in messages]


@pytest.mark.parametrize(
    "error",
    [
        ASSERTION,
        *said(
            "CUDA error: an illegal memory access was encountered" + HINT,
            "CUDA error: unspecified launch failure",
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA driver error: an illegal instruction was encountered",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED",
            "HIP error: the operation cannot be performed in the present state",
            "Triton Error [CUDA]: misaligned address",
        ),
        DistBackendError("NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nCuda failure 700 'illegal access'"),
        raised(TLTError("the drafter could not be moved"), cause=ASSERTION),
        raised(RuntimeError("another one, while it was cleared away"), during=ASSERTION),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:50]}",
)
def test_an_error_that_stays_for_the_processs_life(error):
    assert spoils_device(error)


@pytest.mark.parametrize(
    "error",
    [
        SHORT,
        *said(
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "CUDA driver error: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "Triton Error [CUDA]: out of memory",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
            "No CUDA GPUs are available",
        ),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs"),
        DistBackendError("NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nCuda failure 2 'out of memory'"),
        TLTError("a session needs 9.0 GiB of device memory"),
        ValueError("CUDA error: somebody's words"),
        raised(TLTError("no room"), cause=SHORT),
        raised(ZeroDivisionError("another one"), during=SHORT),
        raised(TLTError("known and dealt with"), during=ASSERTION, hides=True),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:50]}",
)
def test_an_error_after_which_it_goes_on(error):
    assert not spoils_device(error)


def test_tritons_lack_of_registers_or_shared_memory_is_no_fault_of_the_device():
    errors = pytest.importorskip("triton.runtime.errors")
    assert not spoils_device(errors.OutOfResources(300_000, 232_448, "shared memory"))


def test_the_process_ends_at_once_and_says_why():
    program = """
import atexit, torch
from verl_tlt.spot_worker.worker import ending_with_its_device
atexit.register(print, "cleared away")
try:
    with ending_with_its_device():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
finally:
    print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "device-side assert triggered" in done.stderr


def test_any_other_error_is_raised():
    with pytest.raises(ZeroDivisionError), ending_with_its_device():
        1 / 0  # noqa: B018
    with ending_with_its_device():
        pass
