"""The page in a real browser, offline: nothing is logged, nothing is asked for, and 64 replicas can be read."""

import pytest

from verl_tlt.report.page import write_report
from verl_tlt.report.reader import read_trace
from verl_tlt.report.summary import rows_of_trace

pytest.importorskip("websockets", reason="needs the package websockets, to speak to a browser")
from browser import find_browser, started

EXECUTABLE = find_browser()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium or Chrome is installed (Debian: chromium)")

VISIBLE = "[...document.querySelectorAll('section')].filter(s => s.offsetHeight > 0).map(s => s.id)"
OVERLAPPING = """(() => {
  const shown = [...document.querySelectorAll('section:target svg text')].map(t => [t, t.getBoundingClientRect()]);
  const bad = [];
  shown.forEach(([a, p], i) => shown.slice(i + 1).forEach(([b, q]) => {
    if (a.ownerSVGElement !== b.ownerSVGElement) return;
    const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (x > 1 && y > 2) bad.push(a.textContent + ' | ' + b.textContent);
  }));
  return bad;
})()"""
SMALLEST = """Math.min(...[...document.querySelectorAll('section:target svg text')].map(
  t => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getScreenCTM().a))"""
CUT_OFF = """[...document.querySelectorAll('section:target svg text')].filter(t => {
  const box = t.getBoundingClientRect(), frame = t.ownerSVGElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
}).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(EXECUTABLE, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module", params=["made_run", "many_replicas"])
def page(request, tmp_path_factory):
    trace = read_trace(request.getfixturevalue(request.param).directory)
    return write_report(tmp_path_factory.mktemp("page") / "report.html", trace, rows_of_trace(trace))


def test_a_step_is_chosen_by_its_link(browser, page):
    browser.open(page)
    (first,) = browser.run(VISIBLE)
    assert first.startswith("step-")
    for link in ("nav a[href='#step-1']", "section:target a[href='#step-2']", "table a[href='#step-3']"):
        browser.run(f'document.querySelector("{link}").click()')
        assert browser.run(VISIBLE) == [link[link.index("#") + 1 : -2]]
    browser.run("history.back()")
    assert browser.run("document.querySelectorAll('details').length") >= 2
    assert browser.problems == []
    assert set(browser.requests) <= {browser.run("location.href.split('#')[0]")}, "nothing but the page is loaded"
    browser.requests.clear()


def test_what_a_step_shows_can_be_read(browser, page):
    browser.open(page, fragment="#step-3")
    lanes = browser.run("document.querySelectorAll('section:target text.lane').length")
    assert lanes == (64 if "replica 63" in page.read_text() else 2)
    assert browser.run(OVERLAPPING) == []
    assert browser.run(CUT_OFF) == []
    assert browser.run(SMALLEST) >= 10
    browser.requests.clear()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_window(browser, page, width):
    browser.open(page, width=width, fragment="#step-2")
    assert browser.run("document.documentElement.scrollWidth") <= width, "wide charts and tables scroll by themselves"
    assert browser.problems == []
    browser.requests.clear()


def test_the_browser_sees_problems(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('x'); nothing()</script><img src='https://example.com/a.png'>")
    browser.open(path)
    kinds = {problem["method"] for problem in browser.problems}
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed"} <= kinds
    assert "https://example.com/a.png" in browser.requests
