"""What the README's install line and `make wheel` bring: installed beside verl and vLLM, and used from elsewhere.

`make test-3.12` tries it with Python 3.12.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import verl_tlt

ROOT = Path(verl_tlt.__file__).parents[1]
LARGEST = 1_000_000
REPOSITORY = "https://example.org/x"


def shell(*command, more=(), **kwargs):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(more)
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, **kwargs)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the clone, because setuptools leaves its own folders where it builds."""
    place = tmp_path_factory.mktemp("clone") / "checkout"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "demo-out", "outputs")
    shutil.copytree(ROOT, place, ignore=left_out)
    return place


@pytest.fixture(scope="module")
def wheel(checkout):
    """As `make wheel` builds it for a repository."""
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", checkout.parent, checkout)
    shell(sys.executable, "-m", "pip", *build, more={"VERL_TLT_REPOSITORY": REPOSITORY})
    (built,) = checkout.parent.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """The `bin` folder of a clean environment in which the README's line was run, with this one's packages behind it.

    pip may fetch nothing, so it fails where the package wants what verl and vLLM do not bring.
    """
    place = tmp_path_factory.mktemp("environment")
    shell(sys.executable, "-m", "venv", "--without-pip", place)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "verl_and_vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # requirements/cpu.lock says why these are not here, or another triton than the one that PyPI's torch names.
    needs = re.search(r"\btriton==([\d.]+)", " ".join(metadata.requires("torch") or ()))
    for name, version in {"torchaudio": "0.1", "torchvision": "0.1", **({"triton": needs[1]} if needs else {})}.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(about)
    (line,) = re.findall(r"^pip (install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "VERL_TLT_REPOSITORY": ""}  # 0 is "no isolation"
    said = shell(place / "bin" / "python", "-m", "pip", *shlex.split(line, comments=True), cwd=checkout, more=offline)
    assert re.findall(r"Successfully installed (.*)", said) == [f"verl-tlt-{verl_tlt.__version__}"], "it moved others"
    return place / "bin"


def test_it_holds_the_plugin_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"verl_tlt"}
    assert {"verl_tlt/py.typed", "verl_tlt/commands/report/page.html"} <= set(names)
    inside = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert inside == {".html", ".py", ".typed"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_tlt").rglob("*.py")}
    assert {name for name in names if name.startswith("verl_tlt/") and name.endswith(".py")} == sources
    assert wheel.stat().st_size < LARGEST


def test_what_it_says_of_itself(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    points = archive.read(f"{info}/entry_points.txt").decode()
    for section in (
        "[console_scripts]\nverl-tlt = verl_tlt.commands.cli:app\n",
        "[verl.plugins]\ntlt = verl_tlt.plugin\n",
    ):
        assert section in f"{points}\n"
    said = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert sum(line.startswith("speculators") for line in needed) == 1
    assert not [line for line in needed if line.startswith(("torch", "vllm", "verl", "ray", "matplotlib"))]
    assert said["Version"] == verl_tlt.__version__ and "report" in said.get_all("Provides-Extra")


def test_links_in_its_readme_work_outside_the_repository(wheel, installed):
    archive = zipfile.ZipFile(wheel)
    (inside,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    (unpacked,) = installed.parent.glob("lib/python*/site-packages/verl_tlt-*.dist-info/METADATA")
    of_repository, without = archive.read(inside).decode(), unpacked.read_text()
    for text in (of_repository, without):
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("#")]
        assert links and all(link.startswith("https://") for link in links)
    paths = re.findall(rf"\]\({REPOSITORY}/\w+/main/([^)#\s]+)", of_repository)
    assert paths and all((ROOT / path).exists() for path in paths)
    assert f"Project-URL: Repository, {REPOSITORY}" in of_repository and REPOSITORY not in without


def test_it_works_where_verl_and_vllm_are(installed, tmp_path):
    where = "import verl_tlt; print(verl_tlt.__file__)"
    assert shell(installed / "python", "-c", where, cwd=tmp_path).startswith(str(installed.parent))
    assert shell(installed / "verl-tlt", "--version", cwd=tmp_path) == f"verl-tlt {verl_tlt.__version__}\n"
    said = shell(installed / "verl-tlt", "doctor", cwd=tmp_path)
    assert "refuse" not in said and "TLT can run with the packages installed here" in said
