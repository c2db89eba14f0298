"""What `pip install verl-tlt` brings: the wheel is built, installed beside verl and vLLM, and used from elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import verl_tlt

ROOT = Path(verl_tlt.__file__).parents[1]
LARGEST = 1_000_000


def shell(*command, **kwargs):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, **kwargs)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, because setuptools leaves its own folders where it builds."""
    place = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "demo-out", "outputs")
    shutil.copytree(ROOT, place / "checkout", ignore=left_out)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", place, place / "checkout")
    shell(sys.executable, "-m", "pip", *build)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` folder of an environment that has the wheel, and this one's packages behind it."""
    place = tmp_path_factory.mktemp("environment")
    shell(sys.executable, "-m", "venv", "--without-pip", place)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "verl_and_vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", place / "bin" / "python")
    shell(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return place / "bin"


def test_it_holds_the_plugin_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"verl_tlt", "hydra_plugins"}
    assert {
        "verl_tlt/py.typed",
        "verl_tlt/report/page.html",
        "verl_tlt/conf/tlt/default.yaml",
        "hydra_plugins/verl_tlt_search.py",
    } <= set(names)
    inside = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert inside == {".html", ".py", ".yaml", ".typed"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_tlt").rglob("*.py")}
    assert {name for name in names if name.startswith("verl_tlt/") and name.endswith(".py")} == sources
    assert wheel.stat().st_size < LARGEST


def test_what_it_says_of_itself(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    points = archive.read(f"{info}/entry_points.txt").decode()
    for line in (
        "verl-tlt = verl_tlt.cli:app", "tlt = verl_tlt.plugin", "tlt = verl_tlt.activation",
    ):  # fmt: skip
        assert line in points.splitlines()
    said = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert sum(line.startswith("speculators") for line in needed) == 1
    assert not [line for line in needed if line.startswith(("torch", "vllm", "verl", "ray", "matplotlib", "psutil"))]
    assert said["Version"] == verl_tlt.__version__ and {"report", "demo"} <= set(said.get_all("Provides-Extra"))


def test_it_works_where_verl_and_vllm_are(installed, tmp_path):
    where = "import verl_tlt; print(verl_tlt.__file__)"
    assert shell(installed / "python", "-c", where, cwd=tmp_path).startswith(str(installed.parent))
    assert shell(installed / "verl-tlt", "--version", cwd=tmp_path) == f"verl-tlt {verl_tlt.__version__}\n"
    said = shell(installed / "verl-tlt", "doctor", cwd=tmp_path)
    assert "refuse" not in said and "all " in said and "verl symbols" in said and "vllm symbols" in said


def test_verl_and_hydra_find_it(installed, tmp_path):
    code = """
import importlib.metadata as metadata
from hydra import compose, initialize_config_module
print(metadata.entry_points(group="verl.plugins")["tlt"].load().__name__)
with initialize_config_module("verl.trainer.config", version_base=None):
    print(compose("ppo_trainer", overrides=["+tlt=default"]).tlt.spot.min_merge_steps)
"""
    name, setting = shell(installed / "python", "-c", code, cwd=tmp_path).split()[-2:]
    assert name == "verl_tlt.plugin" and int(setting) > 0
