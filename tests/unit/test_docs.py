"""Pages: links resolve, and generated parts equal the code and the files that they are made from."""

import importlib
import re
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
