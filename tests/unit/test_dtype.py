import pytest

from verl_cpu.dtype import find_dtype

AVX2 = "fpu sse4_2 fma avx avx2 f16c bmi2"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (AVX2, "float32"),
        (AVX2 + " avx512f avx512bw avx512vl avx512_vnni avx512_fp16", "float32"),  # wide, but no bf16 products
        (AVX2 + " avx512f avx512_bf16", "bfloat16"),
        (AVX2 + " amx_bf16 amx_tile", "bfloat16"),
    ],
)
def test_the_dtype_is_the_one_the_processor_multiplies(tmp_path, flags, dtype):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A CPU: fast\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n\n" * 2)
    assert find_dtype(cpuinfo) == dtype
    assert find_dtype(tmp_path / "nowhere") == "float32"
