"""Pages: links and names resolve, and generated parts equal the code and the files that they are made from."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from doc_commands import PAGES

import verl_tlt
from verl_tlt.config import TLTConfig, is_setting

ROOT = Path(verl_tlt.__file__).parents[1]
DOCS = ROOT / "docs"
METRICS = re.findall(r"^\| `(tlt/[^`]+)` \|", (DOCS / "metrics-and-troubleshooting.md").read_text(), re.MULTILINE)
"""Rows of the metrics page; tests/unit/trace/test_step_metrics.py compares them with what a step logs."""
SETTINGS = [
    f"tlt.{name}.{f.name}"
    for name, cls in typing.get_type_hints(TLTConfig).items()
    for f in dataclasses.fields(cls)
    if is_setting(f)
]
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


@each_page
def test_settings_metrics_and_modules_named_in_a_page_exist(page):
    text = page.read_text()
    known = {*SETTINGS, *(name.rpartition(".")[0] for name in SETTINGS), "tlt"}
    assert set(re.findall(r"(?<![.\w])tlt\.[a-z]+(?:\.[a-z_]+)*", text)) <= known
    metrics = [re.compile(re.sub(r"<\w+>", r"(\\w+|<\\w+>)", name)) for name in METRICS]
    for name in re.findall(r"`(tlt/[a-z_0-9<>]+)`", text):
        assert any(metric.fullmatch(name) for metric in metrics), f"{page.name} names {name}"
    for name in re.findall(r"\b(?:verl_tlt|demo|tests\.toy|benchmarks)(?:\.[a-z_][a-z0-9_]*)+", text):
        folder, *rest = name.split(".")
        here = ROOT / folder
        while rest and (here / rest[0]).is_dir():
            here /= rest.pop(0)
        if rest and not (here / f"{rest[0]}.py").exists():
            assert rest[0] in (here / "__init__.py").read_text(), f"{page.name} names {name}"


def test_the_site_builds_and_no_link_in_it_is_broken(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_links_out_of_the_site_become_names_or_lead_to_the_repository(docs_module):
    page = "[a.py](../verl_tlt/idle/a.py#here), [its room](../verl_tlt/idle/) and [settings](settings.md)"
    names = "`verl_tlt/idle/a.py`, its room: `verl_tlt/idle/` and [settings](settings.md)"
    markdown = docs_module("hook").on_page_markdown
    assert markdown(page, config={"repo_url": None}).startswith(f"{names}\n")
    assert markdown(page, config={"repo_url": "https://example.org/x/"}).startswith(
        "[a.py](https://example.org/x/blob/main/verl_tlt/idle/a.py#here), "
        "[its room](https://example.org/x/tree/main/verl_tlt/idle/) and [settings](settings.md)\n"
    )


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
