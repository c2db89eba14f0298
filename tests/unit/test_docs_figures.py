"""The figures of the pages can be drawn again from the files of results, and a page shows each of them."""

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from doc_commands import PAGES
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("bubble", "chosen-k", "accept-length")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("figures")


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_can_be_drawn_again(figures, name, tmp_path):
    drawn = [figures.draw(name, folder) for folder in (tmp_path, tmp_path)]
    first, again = (path.read_bytes() for path in drawn)
    assert first == again and len(first) < 100_000
    assert (DOCS / f"{name}.svg").stat().st_size < 100_000
    assert float(ElementTree.fromstring(first).attrib["width"].removesuffix("pt")) < 358, "can be read on a phone"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_it_and_says_what_it_shows(figures, name):
    shown = [text for page in PAGES for text in re.findall(rf"!\[([^]]*)\]\([^)]*\b{name}\.svg\)", page.read_text())]
    assert shown and all(shown)
    assert set(figures.FIGURES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_it_is_cut(figures, name):
    _, height, draw = figures.FIGURES[name]
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure, figures.numbers(name))
        figure.draw_without_rendering()
        found = figure.get_tightbbox()
    assert found.x0 >= 0 and found.y0 >= 0 and found.x1 <= 4.6 and found.y1 <= height
