"""Which releases verl-tlt works with, and what is installed here. Reads metadata only: imports none of them."""

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_tlt.errors import TLTError

Release = tuple[int, int, int]


UNTESTED = "TLT_UNTESTED"
"""With this environment variable set to 1 a run goes on with releases that verl-tlt was not tested with."""


@dataclass(frozen=True)
class Supported:
    """A package of the user's own environment, and the releases of it that verl-tlt was tested with."""

    name: str
    lowest: Release
    highest: Release
    """Any patch release of this minor release is taken as tested."""
    remedy: str

    @property
    def tested(self) -> str:
        """The range of releases in words, as `vllm 0.24 to 0.31`."""
        low, high = (".".join(map(str, numbers)).removesuffix(".0") for numbers in (self.lowest, self.highest))
        return f"{self.name} {low}" if low == high else f"{self.name} {low} to {high}"

    def includes(self, version: str) -> bool:
        """Whether a version string names one of the tested releases."""
        numbers = release(version)
        return numbers is not None and self.lowest <= numbers and numbers[:2] <= self.highest[:2]


SUPPORTED = (
    # 0.9.0 has neither the submission gate nor the router module: a replica that leaves early would lose requests.
    Supported("verl", (0, 9, 1), (0, 9, 1), "pip install verl==0.9.1"),
    Supported("vllm", (0, 24, 0), (0, 31, 0), "install the vLLM that verl 0.9.1 names"),
    Supported("speculators", (0, 9, 0), (0, 9, 0), "pip install 'speculators>=0.9,<0.10'"),
)


def release(version: str) -> Release | None:
    """(major, minor, patch) of a version string, a missing patch as 0; None if it does not start with two numbers."""
    match = re.match(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


_first: list[str] = []
"""Folders in which packages are looked for before all others."""


def look_first_in(folders: Iterable[str]) -> None:
    """From now on look for packages in these folders first, as `python -m` does that is started in the first."""
    _first[:] = [folder for folder in folders if folder]


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """What an import of a top-level package would find; None: nothing."""
    try:
        if _first and name not in sys.modules:
            spec = importlib.machinery.PathFinder.find_spec(name, _first)
            if spec is not None and spec.origin is not None:  # without an origin it is a folder that is no package
                return spec
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def location(name: str) -> Path | None:
    """The directory of an importable top-level package; None where it is not there."""
    spec = _spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installed(name: str) -> str | None:
    """Version of an importable top-level package; None if it is not there, "unknown" if it does not say.

    Metadata alone does not count: a distribution called `vllm` without modules cannot serve.
    """
    module = sys.modules.get(name)
    spec = _spec(name)
    if module is None and (spec is None or spec.origin is None):  # without an origin it is a folder, no package
        return None
    folder = location(name)
    if folder is not None:
        version_file = folder / "version" / "version"  # verl has it, also in a clone
        if version_file.is_file():
            return version_file.read_text().strip()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


def require(*names: str) -> None:
    """Raise a `TLTError` that says which of these packages a command lacks."""
    if missing := [name for name in names if installed(name) is None]:
        it = "it" if len(missing) == 1 else "them"
        raise TLTError(f"Install {' and '.join(missing)}: this command needs {it}.")
