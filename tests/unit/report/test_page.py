"""The page holds the numbers and the pictures, runs nothing, and asks nothing of the network."""

import json
import re
import shlex
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.report.page import Serving, write_report
from verl_tlt.report.reader import TraceError, read_trace
from verl_tlt.report.summary import rows_of_trace
from verl_tlt.trace.events import TraceWriter

VOID = {"meta", "br", "link", "img", "input"}
EVIL = '"><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>'


class Page(HTMLParser):
    """Tags, links and text of a page, the text of each section apart; refuses tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.ids, self.handlers = [], [], [], []
        self.words, self.sections, self.default = [], {}, []
        self._open, self._section = [], None
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "section":
            self._section = found["id"]
            self.sections[self._section] = []
            self.default += [found["id"]] if "first" in found["class"].split() else []
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "section":
            self._section = None

    def handle_data(self, data):
        self.words.append(data)
        if self._section:
            self.sections[self._section].append(data)


def test_speculation_that_was_stopped_is_told_with_its_cause(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("run", step0=1)
    writer.emit("stopped", step=4, cause=f"accept length of 1.02 {EVIL}")
    writer.emit("stopped", step=30, cause="")
    writer.emit("phase", step=4, name="rollout", start=0.0, end=2.0)
    writer.emit("step", step=4, metrics={"timing_s/gen": 2.0})
    trace = read_trace(tmp_path)
    page = Page(write_report(tmp_path / "page.html", trace, rows_of_trace(trace)).read_text())
    assert "After step 4 it was stopped: accept length of 1.02" in page.text and "After step 30 it went on" in page.text
    assert "script" not in page.tags


@pytest.fixture(scope="module")
def path(made_run, tmp_path_factory):
    trace = read_trace(made_run.directory)
    rows = rows_of_trace(trace)
    serving = Serving("assets/policy", "demo-out/the drafter", 3)
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(path, trace, rows, stock=rows, warm=rows, serving=serving)


@pytest.fixture(scope="module")
def page(path):
    return Page(path.read_text())


def test_the_page_says_what_was_saved_and_lost(page, made_run):
    saved, work = sum(made_run.saved_s.values()), 6 * 0.07  # the run's own work: stop 0.05, publish 0.02
    assert f"{saved - work:+.1f} s" in page.words
    assert f"{saved:.1f} s" in page.words and f"{work:.1f} s" in page.words
    for step, seconds in made_run.saved_s.items():
        word = "saved" if round(seconds, 2) >= 0 else "lost"
        assert f"step {step}: {word} {abs(seconds):.2f} s, own work 0.07 s, net {seconds - 0.07:+.2f} s" in page.words
        assert f"{abs(seconds):.2f} s" in page.sections[f"step-{step}"]
    assert made_run.saved_s[3] < -1, "one step lost, so that this is tested too"


def test_a_run_without_a_baseline_says_that_nothing_is_known(tmp_path):
    writer = TraceWriter(tmp_path, "driver")
    writer.emit("run", step0=1, replicas=["a"])
    writer.emit("phase", step=1, name="rollout", start=0.0, end=2.0)
    writer.emit("step", step=1, metrics={"tlt/overhead_s": 0.25})
    trace = read_trace(tmp_path)
    text = Page(write_report(tmp_path / "r.html", trace, rows_of_trace(trace)).read_text()).text
    assert "No step says what TLT saved" in text and "saved in rollout" not in text


def test_the_page_holds_the_numbers(page, made_run):
    for step in made_run.accept_length:
        assert f"{made_run.accept_length[step]:.2f}" in page.words
        assert f"{made_run.bubble_s[step]:.1f}" in page.words
    assert f"{made_run.accept_length[1]:.2f} → {made_run.accept_length[6]:.2f}" in page.words
    assert "1.00x" in page.words
    assert page.tags.count("table") == 3 + 5, "three runs, and the sessions of five steps"


def test_every_step_shows_every_replica(made_run, page):
    assert list(page.sections) == [f"step-{i}" for i in range(1, 7)]
    assert len(page.default) == 1
    metrics = read_trace(made_run.directory).steps
    for number, words in enumerate(page.sections.values(), 1):
        assert {"replica 0", "replica 1", f"RL step {number}"} <= set(words)
        assert f"rollout ends: {made_run.rollout_s[number] + 0.06:.1f} s" in words
        for position in range(1, 6):
            share = metrics[number].get(f"tlt/accept_rate_pos_{position}")
            assert share is None or f"{share:.0%}" in words


def test_every_link_leads_somewhere_in_the_page(page):
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    for step in range(1, 7):
        assert page.links.count(f"#step-{step}") >= 4, "from chart, table, chooser and neighbours"


def test_the_page_stands_alone(page, path):
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import|https?:", path.read_text())
    assert 20_000 < path.stat().st_size < 1_000_000


def test_names_errors_and_reasons_are_text(tmp_path):
    writer = TraceWriter(tmp_path, "driver")
    writer.emit("run", step0=1, replicas=[EVIL], policy=EVIL, drafter=EVIL)
    writer.emit("phase", step=1, name="rollout", start=0.0, end=9.0)
    session = {"worker": EVIL, "start": 1.0, "end": 2.0, "steps": 1, "tokens": 1, "outcome": EVIL, "error": EVIL}
    writer.emit("session", step=1, replica=EVIL, **session)
    writer.emit("publish", step=1, version=1, decision=EVIL, reason=EVIL + "\ud800", tau={EVIL: 1.0})
    writer.emit("reload", step=1, replica="other " + EVIL, version=1, fingerprint=EVIL, ok=False)
    writer.emit("step", step=1, metrics={f"tlt/overhead_{EVIL}_s": 1.0, "tlt/saved_s": 1.0})
    trace = read_trace(tmp_path)
    page = Page(write_report(tmp_path / "r.html", trace, [], serving=Serving.of_trace(trace)).read_text())
    assert not {"script", "img"} & set(page.tags) and not page.handlers
    assert page.text.count("<script>alert(1)</script>") >= 4


def hostile(value):
    """A record in which every text has markup in it, and some names of metrics have."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [hostile(item) for item in value]
    if isinstance(value, dict):
        kept = {name: value[name] for name in ("kind", "t") if name in value}
        if value.get("kind") == "phase":
            kept["name"] = value["name"]  # else no step has a rollout
        if value.get("kind") == "step":
            kept["metrics"] = value["metrics"] | {EVIL: 1.0, f"tlt/{EVIL}": 1.0, f"tlt/overhead_{EVIL}_s": 1.0}
        if value.get("kind") == "load":
            kept["inflight"] = {hostile(name): number for name, number in value["inflight"].items()}
        return {name: hostile(item) for name, item in value.items()} | kept
    return value


def test_whatever_a_trace_says_is_text(made_run, tmp_path):
    directory = tmp_path / "[bold]t[/nope]<script>alert(1)<"  # rich's markup, too
    directory.mkdir(parents=True)
    for file in made_run.directory.glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        if file.stem.startswith("engine-"):
            name = f"{file.stem}{EVIL.replace('/', '')}"
        else:
            name, records = file.stem, [hostile(record) for record in records]
            run = next(record for record in records if record["kind"] == "run")
            run |= {"policy": EVIL, "drafter": EVIL, "mode": EVIL, "versions": {EVIL: EVIL}}
            errors = {"outcome": EVIL, "error": EVIL, "worker": EVIL}
            records = [r | errors if r["kind"] == "session" else r for r in records]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    timeline = tmp_path / "timeline.json"
    done = CliRunner().invoke(
        app, ["report", str(directory), "--out", str(tmp_path / "out"), "--perfetto", str(timeline)]
    )
    assert done.exit_code == 0, done.output
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags) and not page.handlers
    assert all(link.startswith("#") for link in page.links)
    assert len(page.sections) == made_run.steps and page.text.count("<script>alert(1)</script>") >= made_run.steps
    assert any(EVIL in json.dumps(event["args"], ensure_ascii=False).replace('\\"', '"')
               for event in json.loads(timeline.read_text()))  # fmt: skip


def test_many_replicas_and_steps_stay_small(many_replicas, tmp_path):
    trace = read_trace(many_replicas.directory)
    path = write_report(tmp_path / "r.html", trace, rows_of_trace(trace))
    page = Page(path.read_text())
    for words in page.sections.values():
        assert {f"replica {i}" for i in range(64)} <= set(words)
    assert path.stat().st_size / len(page.sections) < 100_000


def test_the_serve_command_survives_a_shell(path):
    command = Serving("assets/policy", "demo-out/the drafter", 3).command()
    argv = shlex.split(command)
    assert argv[:3] == ["vllm", "serve", "assets/policy"]
    config = json.loads(argv[4])
    assert config["model"] == "demo-out/the drafter" and config["num_speculative_tokens"] == 3
    assert re.search(r"<pre>vllm serve assets/policy", path.read_text())


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
