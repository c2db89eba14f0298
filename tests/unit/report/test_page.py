"""The page of a run: the answer first, its numbers, and what failed."""

import sys
from html.parser import HTMLParser
from itertools import count

import pytest
from cli import cli

from verl_tlt.commands.report.html import write_page
from verl_tlt.commands.report.page import about, run_page
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import sentences
from verl_tlt.trace.events import TraceWriter


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(path.read_text())
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words += [data.strip()] if data.strip() else []


def written(directory):
    """The page of the trace in a directory."""
    return Page(write_page(directory / "r.html", run_page(read_trace(directory))))


@pytest.fixture
def writer(tmp_path):
    """Writes the trace of a run of two replicas, of which one rollout, of step 4, is there already."""
    writer = TraceWriter(tmp_path, "trainer", clock=map(float, count(1_800_000_000)).__next__)
    writer.emit("run", step0=1, replicas=["a", "b"])
    writer.emit("phase", step=4, name="rollout", start=0.0, end=2.0)
    return writer


@pytest.fixture(scope="module")
def page(made_run, tmp_path_factory):
    return Page(write_page(tmp_path_factory.mktemp("report") / "report.html", run_page(read_trace(made_run.directory))))


def test_the_page_says_first_whether_it_paid(page, made_run):
    drafted = list(made_run.accept_length)
    assert 0 < len(drafted) < 6, "so that some rollouts do not count"
    saved, work = sum(made_run.saved_s[step] for step in drafted), 6 * 0.07  # stop 0.05, publish 0.02
    net, whole = saved - work, sum(float(row["timing_s/step"]) for row in read_trace(made_run.directory).steps.values())
    undrafted = whole + net
    answer = (
        f"TLT saved an estimated {net:.1f} s in steps 1 to 6, {net / undrafted:.1%} of the {undrafted:.0f} s that they "
        f"would have taken without it: drafts saved {saved:.1f} s in {len(drafted)} of 6 rollouts, and TLT's own work "
        f"took {work:.1f} s."
    )
    charts = next(i for i, words in enumerate(page.words) if "what every replica did" in words)
    assert page.words.index(answer) < charts < page.words.index("What it saved")


def test_the_page_holds_the_numbers_and_the_charts(page, made_run):
    for step in made_run.accept_length:
        assert {f"{made_run.accept_length[step]:.2f}", f"{made_run.bubble_s[step]:.1f}"} <= set(page.words)
    assert "accept length, step 6" in page.words
    assert page.words.count("published") == 5
    assert {"What it saved", "Accept length", "Draft length K", "Idle time", "Reward"} <= set(page.words), "the charts"


def test_texts_of_a_run_are_no_markup(tmp_path, writer):
    writer.emit("run", step0=5, name="<b>$x^2$</b>", policy="a & b")
    page = written(tmp_path)
    assert "<b>$x^2$</b>" in page.words and "b" not in page.tags


def test_without_savings_the_page_says_so(tmp_path, writer):
    assert "No step is finished yet." in written(tmp_path).words
    writer.emit(
        "step", step=1, metrics={"tlt/saved_estimate_s": 0.7, "tlt/draft_length_mean": 0.0, "tlt/overhead_s": 0.25}
    )
    page = written(tmp_path)
    assert "TLT saved nothing in steps 1 to 1: nothing was drafted." in page.text and "0.7" not in page.text
    writer.emit("step", step=2, metrics={"tlt/accept_length": 1.0, "tlt/draft_length_mean": 1.0})
    assert "What TLT saved in steps 1 to 2 is not known" in written(tmp_path).text


def test_what_was_switched_off_and_what_failed_is_told(tmp_path, writer):
    writer.emit("stopped", step=4, cause="accept length of 1.02")
    writer.emit("stopped", step=30, cause="")
    writer.emit("session", step=4, replica="a", start=1.0, end=2.0, outcome="failed", error="out of memory")
    writer.emit("reload", step=4, replica="a", version=3, ok=False)
    writer.emit("step", step=4, metrics={"tlt/errors": 2.0, "tlt/overhead_cold_start_s": 24.2})
    (tmp_path / "more.jsonl").write_text("half a line")
    assert {
        "Drafting was switched off: accept length of 1.02 (step 4).", "Drafting was switched on again (step 30).",
        "In step 4 the run waited 24 s for its first drafter (cold start).",
        "1 line of the trace could not be read.", "out of memory", "v3 was loaded instead",
        "TLT counted 2 failures and warnings (tlt/errors); none ended the run.",
    } <= set(written(tmp_path).words)  # fmt: skip


def test_drafting_begins_again_where_a_run_is_resumed(tmp_path, writer):
    writer.emit("stopped", step=4, cause="it was slower")
    writer.emit("run", step0=5)
    began = "Drafting began again when the run was resumed at step 5."
    writer.emit("step", step=5, metrics={"tlt/errors": 1.0})
    assert [*sentences(read_trace(tmp_path))][-3:-1] == ["Drafting was switched off: it was slower (step 4).", began]
    assert "TLT counted 1 failure or warning (tlt/errors); it did not end the run." in written(tmp_path).words
    writer.emit("step", step=5, metrics={}, off="it is expected to save nothing")
    assert began not in written(tmp_path).words
    writer.emit("stopped", step=5, cause="it was slower")
    writer.emit("stopped", step=30, cause="")
    writer.emit("run", step0=31)
    assert "step 31" not in written(tmp_path).text, "it drafted already"


def test_the_idle_devices_of_a_run_with_standalone_engines_are_the_trainers(tmp_path, writer):
    writer.emit("step", step=4, metrics={"timing_s/step": 4.0, "timing_s/gen": 2.0, "tlt/idle_s": 1.5})
    colocated = written(tmp_path).text
    assert "rollout's share of a step 50%" in colocated and "idle time of replicas" in colocated
    writer.emit("run", step0=5, replicas=["a", "b"], standalone=["a", "b"])
    page = written(tmp_path).text
    assert "rollout's share" not in page and "nothing to decode while another" not in page
    assert "wait for samples, share of a step 50%" in page and "idle time of the trainer's devices 1.5 s" in page


def test_a_run_that_was_begun_anew_has_its_own_date(tmp_path):
    """In the folder of one that was given up; and it was resumed."""
    days = iter(range(0, 10**6, 86400))
    writer = TraceWriter(tmp_path, "trainer", lambda: float(next(days)))
    for step0 in (1, 1, 2):
        writer.emit("run", step0=step0)
        writer.emit("step", step=step0, metrics={})
    assert "1970-01-03" in about(read_trace(tmp_path))


def test_the_first_chart_is_of_a_step_that_the_engine_traces_still_hold(tmp_path, writer):
    for step in range(5, 8):
        start = 100.0 * step
        writer.emit("phase", step=step, name="rollout", start=start, end=start + 50.0)
        seconds = 50.0 / step  # the most in the first
        writer.emit("session", step=step, replica="a", start=start, end=start + seconds, outcome="stopped", steps=1)
    assert "RL step 5: what every replica did" in written(tmp_path).words
    for name, since in (("a", 530.0), ("b", 510.0), ("c", None)):  # the beginning is dropped; one has not begun
        rows = "" if since is None else "".join(f'{{"t":{since + i},"batch":1,"k":2}}\n' for i in range(300))
        (tmp_path / f"engine-{name}.jsonl").write_text(rows)
    assert "RL step 5: what every replica did" in written(tmp_path).words, "nothing was dropped"
    for name in "ab":
        (tmp_path / f"engine-{name}.jsonl").rename(tmp_path / f"engine-{name}.jsonl.old")
        (tmp_path / f"engine-{name}.jsonl").touch()
    assert "RL step 6: what every replica did" in written(tmp_path).words


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_the_extra_the_command_prints_the_table_and_how_to_get_the_page(made_run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    code, said = cli("report", made_run.directory)
    assert code == 0 and "accept" in said
    assert said.endswith("No page: pip install 'verl-tlt[report]' to have it drawn.\n")
    assert not (made_run.directory.parent / "report.html").exists()


def test_the_command_writes_the_page_to_a_file_or_a_folder(made_run, tmp_path):
    for out, page in ((tmp_path / "a" / "mine.html", "mine.html"), (tmp_path / "b", "report.html")):
        code, said = cli("report", made_run.directory, "--out", out)
        assert code == 0, said
        path = out if out.suffix else out / page
        assert said.startswith("TLT saved an estimated") and str(path) in said and path.stat().st_size > 30_000
    (tmp_path / "file").touch()
    code, said = cli("report", made_run.directory, "--out", tmp_path / "file")
    assert code == 1 and f"--out {tmp_path / 'file'} is a file: name a folder" in said
