"""The dtype in which this processor computes faster.

A processor without bf16 products converts every factor back and forth: it takes 2 to 8 times as long as in fp32.
"""

from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16"]

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""What Linux calls the instructions that multiply bf16."""


def find_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Dtype:
    """The faster dtype by the flags in `/proc/cpuinfo`; float32 if there are none."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return "float32"
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return "float32" if BF16_FLAGS.isdisjoint(flags.split()) else "bfloat16"
    return "float32"


def say_dtype(dtype: Dtype) -> str:
    """The choice and its reason, a sentence."""
    has = "has" if dtype == "bfloat16" else "lacks"
    return f"Computing in {dtype}: this processor {has} bfloat16 products (AVX512-BF16 or AMX)."
