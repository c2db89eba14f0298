"""The page holds the run's numbers and charts, runs nothing, loads nothing, and shows what a trace says as text."""

import base64
import json
import re
import shlex
import sys
from html.parser import HTMLParser
from itertools import count
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from verl_tlt.commands.cli import app
from verl_tlt.commands.report.page import serve_command, write_page
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.trace.events import TraceWriter

ACTIVE = {"script", "link", "iframe", "object", "a"}
EVIL = '"><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>$\\frac{1}$\x1b[31m'


class Page(HTMLParser):
    """Tags, text and charts of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words, self.images, self.attributes = [], [], [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.text = " ".join(self.words)
        self.charts = [" ".join(ElementTree.fromstring(svg).itertext()) for svg in self.images]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "img":
            self.images.append(base64.b64decode(dict(attrs)["src"].removeprefix("data:image/svg+xml;base64,")))

    def handle_data(self, data):
        self.words += [data.strip()] if data.strip() else []


def written(directory):
    """The page of the trace in a directory."""
    return Page(write_page(directory / "r.html", read_trace(directory)))


@pytest.fixture
def writer(tmp_path):
    """Writes the trace of a run of two replicas, of which one rollout, of step 4, is there already."""
    writer = TraceWriter(tmp_path, "trainer", clock=map(float, count(1_800_000_000)).__next__)
    writer.emit("run", step0=1, replicas=["a", "b"])
    writer.emit("phase", step=4, name="rollout", start=0.0, end=2.0)
    return writer


@pytest.fixture(scope="module")
def page(made_run, tmp_path_factory):
    return Page(write_page(tmp_path_factory.mktemp("report") / "report.html", read_trace(made_run.directory)))


def test_the_page_says_first_whether_it_paid(page, made_run):
    drafted = [step for step, length in made_run.accept_length.items() if length > 1]
    assert 0 < len(drafted) < 6, "so that some rollouts do not count"
    saved, work = sum(made_run.saved_s[step] for step in drafted), 6 * 0.07  # stop 0.05, publish 0.02
    net, whole = saved - work, sum(float(row["timing_s/step"]) for row in read_trace(made_run.directory).steps.values())
    answer = (
        f"TLT saved an estimated {net:.1f} s ({net / whole:.1%} of {whole:.0f} s) in steps 1 to 6: {saved:.1f} s by "
        f"drafts in {len(drafted)} of 6 rollouts, less {work:.1f} s of its own work; not measured against stock: "
        "run verl-tlt compare."
    )
    assert page.words.index(answer) < page.words.index("Savings")


def test_the_page_holds_the_numbers_and_the_charts(page, made_run):
    for step in made_run.accept_length:
        assert {f"{made_run.accept_length[step]:.2f}", f"{made_run.bubble_s[step]:.1f}"} <= set(page.words)
    assert page.words.count("published") == 5
    assert page.tags.count("table") == 2, "steps and verdicts; nothing failed"
    assert {"Savings", "Accept length", "Draft length K", "Bubbles"} <= set(page.words)
    assert len(page.charts) == 9, "these, rollout, reward, and three steps"
    lanes = page.charts[-1]
    assert "replica 0" in lanes and "K=5" in lanes and "training" in lanes
    assert f"rollout: {made_run.rollout_s[6] + 0.06:.1f} s" in lanes


def test_the_page_stands_alone(page):
    assert not ACTIVE & set(page.tags)
    assert not re.search(r"url\(|@import|https?:", page.source)
    assert "width=device-width" in page.source


def test_the_page_says_what_ran_where_and_when(tmp_path, writer):
    versions = {"verl-tlt": "0.1.0", "verl": "0.9.1", "vllm": "0.24.0", "ray": "2"}
    run = {"name": "math/qwen", "policy": "Qwen/Qwen3-8B", "hardware": "H100", "gpus": 16, "versions": versions}
    writer.emit("run", step0=5, **run)
    about = "Qwen/Qwen3-8B; 2027-01-15 08:00 UTC; 16 workers on H100; verl-tlt 0.1.0, verl 0.9.1, vllm 0.24.0"
    assert {"verl-tlt: math/qwen", about} <= set(written(tmp_path).words)


def test_steps_that_did_not_draft_say_why(tmp_path, writer):
    useless = "held-out accept length 1.00: next to nothing is accepted"
    for step, off in ((1, useless), (2, "pays from 1.31 on"), (3, "")):
        writer.emit("step", step=step, metrics={"timing_s/step": 3.0}, off=off)
    page = written(tmp_path)
    assert "OFF in 2 of 3 steps, last in step 2: pays from 1.31 on." in page.words
    assert page.words.index("no drafts, since") < page.words.index(useless)


def test_without_savings_the_page_says_so(tmp_path, writer):
    writer.emit("step", step=1, metrics={"tlt/saved_s": 0.7, "tlt/draft_length_mean": 0.0, "tlt/overhead_s": 0.25})
    page = written(tmp_path)
    assert "Unknown whether TLT paid in steps 1 to 1: nothing was drafted." in page.text and "0.7" not in page.text
    writer.emit("step", step=2, metrics={"tlt/accept_length": 1.6, "tlt/draft_length_mean": 1.0})
    assert "Unknown whether TLT paid in steps 1 to 2: what its rollouts would take" in written(tmp_path).text


@pytest.mark.parametrize("then", [{}, {"kind": "stopped", "replica": "b", "cause": ""}, {"kind": "run", "step0": 29}])
def test_spot_training_that_was_given_up_is_told_before_the_figures(tmp_path, writer, then):
    for step, cause in ((4, "out of luck"), (12, "out of memory")):
        writer.emit("stopped", step=step, replica="b", cause=cause)
    if then:
        writer.emit(step=29, **then)
    writer.emit("step", step=4, metrics={"tlt/spot_off_replicas": 1.0})
    told = "Spot training was given up on 1 of 2 replicas (replica 1), last in step 12: out of memory."
    page = written(tmp_path).text
    assert "speculation was" not in page and (told in page) == (not then)
    if not then:
        assert page.index("Unknown whether TLT paid") < page.index(told) < page.index("RL step 4")


def test_what_a_cold_start_was_expected_to_save_and_what_it_did_is_told(tmp_path, writer):
    cold = {"tlt/cold_start_expected_s": 40.0, "tlt/cold_start_steps": 3.0, "tlt/overhead_cold_start_s": 24.2}
    later = [{"tlt/saved_s": saved, "tlt/draft_length_mean": k} for saved, k in ((6.0, 1), (3.0, 0), (7.5, 2), (99, 1))]
    for step, metrics in enumerate([cold, *later], 3):
        writer.emit("step", step=step, metrics=metrics)
    told = "step 3 took 24 s and was expected to save 40 s by step 6; by TLT's own account 3 steps saved 14 s."
    assert told in written(tmp_path).text


def test_disabled_speculation_and_failures_are_told(tmp_path, writer):
    writer.emit("stopped", step=4, cause="accept length of 1.02")
    writer.emit("stopped", step=30, cause="")
    writer.emit("session", step=4, replica="a", start=1.0, end=2.0, outcome="failed", error="out of memory")
    writer.emit("reload", step=4, replica="a", version=3, ok=False)
    writer.emit("step", step=4, metrics={"tlt/errors": 2.0})
    (tmp_path / "more.jsonl").write_text("half a line")
    assert {
        "After step 4 speculation was disabled: accept length of 1.02.", "After step 30 speculation was enabled again.",
        "1 lines of the trace could not be read.", "out of memory", "v3 was loaded instead",
        "2 failures of TLT did not end the run.",
    } <= set(written(tmp_path).words)  # fmt: skip


def hostile(value):
    """A record in which every text has markup in it, but for the words without which the reader drops it."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [hostile(item) for item in value]
    if isinstance(value, dict):
        kept = {name: value[name] for name in ("kind", "name", "mode", "decision", "outcome") if name in value}
        return {(hostile(k) if k.startswith("replica-") else k): hostile(v) for k, v in value.items()} | kept
    return value


def test_whatever_a_trace_says_is_text(made_run, tmp_path):
    directory = tmp_path / "[bold]t[/nope]<script>alert(1)<"  # rich's markup, too
    directory.mkdir(parents=True)
    for file in made_run.directory.glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        if not file.stem.startswith("engine-"):
            records = [hostile(record) for record in records]
            for record in records:
                record |= {"error": EVIL} if record["kind"] == "session" else {}
                record |= {"reason": EVIL * 100, "tau": {EVIL: 1.0}} if record["kind"] == "publish" else {}
                record |= {"policy": EVIL, "drafter": EVIL} if record["kind"] == "run" else {}
                if record["kind"] == "step":
                    record["metrics"] |= {f"tlt/{EVIL}": 1.0, f"tlt/draft_length_frac_{EVIL}": 1.0}
        (directory / f"{file.stem}{EVIL.replace('/', '')}.jsonl").write_text("\n".join(map(json.dumps, records)))
    done = CliRunner().invoke(app, ["report", str(directory), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "picture.png"}
    page = Page(tmp_path / "out" / "report.html")
    assert not ACTIVE & set(page.tags)
    assert page.tags.count("img") == len(page.charts) > 6, "no image but the charts"
    assert not [name for name in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") > 10 and "\x1b" not in page.source
    assert all("script" not in chart for chart in page.charts)


def test_the_command_that_serves_the_drafter(tmp_path, writer):
    run = {"policy": "assets/policy", "drafter": "demo-out/the drafter"}
    writer.emit("run", step0=1, **run, config={"speculation": {"max_draft_length": 5}})
    argv = shlex.split(serve_command(read_trace(tmp_path)))
    assert argv[:3] == ["vllm", "serve", "assets/policy"]
    config = json.loads(argv[4])
    assert config["model"] == "demo-out/the drafter" and config["num_speculative_tokens"] == 5
    writer.emit("run", step0=1, **run, config={"drafter": {"method": "mtp"}})
    argv = shlex.split(serve_command(read_trace(tmp_path)))
    assert argv[:5] == ["verl-tlt", "write-back", "demo-out/the drafter", "assets/policy", "&&"]
    config = json.loads(argv[-1])
    assert config["method"] == "mtp" and "model" not in config, "vLLM looks for it in the policy's directory"
    writer.emit("run", step0=1, config={"speculation": None})
    assert serve_command(read_trace(tmp_path)) == ""


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_what_is_missing_is_one_sentence_after_the_table(made_run, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["report", str(made_run.directory), "--out", str(out)])
    assert done.exit_code == 1 and "accept" in done.output and not out.exists()
    assert f"verl-tlt report needs {package}, which is not installed: pip install matplotlib jinja2.\n" in done.output
