"""Pages: links resolve, and generated parts equal the code and the files that they are made from."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import PAGES

import verl_tlt

ROOT = Path(verl_tlt.__file__).parents[1]
DOCS = ROOT / "docs"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def docs_module(monkeypatch):
    """A module of docs/, by name."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module


def test_the_page_of_settings_is_what_is_generated(docs_module):
    generate = docs_module("generate")
    assert generate.PAGE.read_text() == generate.render(), "run `python docs/generate.py`"


def test_the_figures_in_tables_are_those_of_the_files(docs_module):
    tables = docs_module("tables")
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == [tables.render(page) for page in pages], "run `python docs/generate.py`"
    assert {block[0] for block in tables.BLOCK.findall("".join(pages))} == set(tables.TABLES)


def test_no_file_of_results_names_a_folder_of_a_machine():
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    folder = r"(?<![\w.])/(home|root|tmp|work|mnt|Users)/"
    assert not [path.name for path in files if re.search(folder, path.read_text())]


@each_page
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE) if anchor else ()
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{page.name} links to {target}"


def test_the_site_builds_and_no_link_in_it_is_broken(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("repository", ["", "https://example.org/x"])
def test_links_in_the_readme_of_a_package_work_outside_the_repository(repository, tmp_path):
    """The metadata as pip builds it: no link to a file that its reader does not have."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "verl_tlt").mkdir()
    shutil.copy(ROOT / "verl_tlt" / "__init__.py", tmp_path / "verl_tlt")
    made = "import setuptools.build_meta as m; print(m.prepare_metadata_for_build_wheel('.'))"
    environment = {**os.environ, "VERL_TLT_REPOSITORY": repository}
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", metadata.read_text()) if not link.startswith("#")]
    assert links and all(link.startswith("https://") for link in links)
    if repository:
        inside = {link for link in links if link.startswith(repository)}
        assert inside and f"Project-URL: Repository, {repository}" in metadata.read_text()
        assert all((ROOT / re.sub(r"^.*/main/|#.*$", "", link)).exists() for link in inside)
