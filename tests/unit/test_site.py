"""The site: few pages and words, and nothing it loads comes from another host.

It is built where mkdocs-material is installed (`pip install '.[docs]'`). That needs nothing else of this project's
environment: `pytest --noconftest tests/unit/test_site.py`.
"""

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES, WORDS = 14, 22_000
"""Most that a reader is asked to read: pages of docs/ and words on them, generated text included."""
REPOSITORY = "https://example.org/someone/verl-tlt"


def build(out, **environment):
    """The site as `mkdocs build` makes it; a link or heading that does not exist fails it, which -q would hide."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


def test_there_are_few_pages_and_few_words():
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert len(words) <= PAGES and sum(words.values()) <= WORDS, words


class Loads(HTMLParser):
    """What a browser fetches for a page: styles, scripts, pictures, frames; not the links that one can click."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.found.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.found.append(given["src"])


def test_nothing_is_loaded_from_another_host(site):
    for page in sorted(site.rglob("*.html")):
        loads = Loads(page).found
        assert loads and not [address for address in loads if "//" in address], page
    for sheet in site.rglob("*.css"):
        fetched = re.findall(r"url\(\s*[\"']?(?!data:)([^)\"']*)|@import\s+[\"']([^\"']*)", sheet.read_text())
        assert not [address for found in fetched for address in found if "//" in address], sheet


def test_each_term_of_the_glossary_is_explained_once_a_page_where_it_stands_first(site):
    glossary = (ROOT / "docs" / "metrics.md").read_text().partition("## Terms")[2]
    meanings = {
        m.strip() for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", glossary, re.MULTILINE)[1:] for m in row.split(";")
    }
    found = {page: re.findall(r'<abbr title="([^"]*)">', page.read_text()) for page in site.rglob("index.html")}
    assert {html.unescape(title) for titles in found.values() for title in titles} == {
        m for m in meanings if not m.startswith("to ")
    }
    assert not [page for page in found if re.search("submission <abbr", page.read_text())], "verl's is another one"
    assert all(len(titles) == len(set(titles)) for titles in found.values())


def test_links_to_source_files_lead_to_the_repository_that_is_named(tmp_path):
    page = (build(tmp_path, VERL_TLT_REPOSITORY=REPOSITORY) / "how-it-works" / "index.html").read_text()
    found = re.findall(rf'href="{REPOSITORY}/(?:blob|tree)/main/([^"#]+)"', page)
    assert len(found) > 20 and all((ROOT / path).exists() for path in found)
