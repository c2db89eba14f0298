"""The page holds the numbers and the pictures, and asks nothing of the network."""

import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from verl_tlt.report.page import Serving, write_report
from verl_tlt.report.reader import TraceError, read_trace
from verl_tlt.report.summary import rows_of_trace
from verl_tlt.trace.events import TraceWriter


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value.startswith("http")]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page(made_run, tmp_path_factory):
    trace = read_trace(made_run.directory)
    rows = rows_of_trace(trace)
    serving = Serving("assets/policy", "demo-out/the drafter", 3)
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, trace, rows, stock=rows, warm=rows, serving=serving)
    return path


def test_the_page_holds_the_numbers(page, made_run):
    parsed = _Page()
    parsed.feed(page.read_text())
    text = " ".join(parsed.text)
    for step in made_run.accept_length:
        assert f"{made_run.accept_length[step]:.2f}" in text
        assert f"{made_run.bubble_s[step]:.1f}" in text
    assert f"{made_run.accept_length[1]:.2f} → {made_run.accept_length[6]:.2f}" in text
    assert "1.00x" in text
    assert parsed.tags.count("svg") == 3 and parsed.tags.count("table") == 3


def test_the_page_stands_alone(page):
    parsed = _Page()
    parsed.feed(page.read_text())
    assert parsed.links == []
    assert "script" not in parsed.tags
    assert 20_000 < page.stat().st_size < 6_000_000


def test_the_serve_command_survives_a_shell(page):
    command = Serving("assets/policy", "demo-out/the drafter", 3).command()
    argv = shlex.split(command)
    assert argv[:3] == ["vllm", "serve", "assets/policy"]
    config = json.loads(argv[4])
    assert config["model"] == "demo-out/the drafter" and config["num_speculative_tokens"] == 3
    assert re.search(r"<pre>vllm serve assets/policy", page.read_text())


def test_serving_is_read_from_the_run(tmp_path):
    writer = TraceWriter(tmp_path, "driver")
    writer.emit("run", step0=1, policy="p", drafter="d", config={"speculation": {"max_draft_length": 5}})
    assert Serving.of_trace(read_trace(tmp_path)) == Serving("p", "d", 5)
    writer.emit("run", step0=1)
    assert Serving.of_trace(read_trace(tmp_path)) is None


def test_a_trace_without_a_rollout_is_refused(tmp_path):
    TraceWriter(tmp_path, "driver").emit("run", step0=1)
    with pytest.raises(TraceError, match="no finished rollout"):
        write_report(tmp_path / "r.html", read_trace(tmp_path), [])
