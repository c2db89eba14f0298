"""`verl-tlt report`: prints whether a traced run paid, its steps, and writes its page."""

from pathlib import Path

from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.report.html import write_page
from verl_tlt.commands.report.page import run_page
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import did_it_pay, rich_table, rows_of_trace, sentences
from verl_tlt.errors import TLTError
from verl_tlt.upstream.versions import installed

PAGE = "report.html"
PAGE_NEEDS = ("jinja2", "matplotlib")
"""Packages of the extra `report`."""


def report(trace_dir: Path, out: Path | None) -> None:
    """Print the answer and the steps, and write the page; `out` is its file or folder, by default beside the trace.

    Without the extra there is no page, which is a `TLTError` if `out` asks for one.
    """
    console = make_console()
    trace = read_trace(trace_dir)
    rows = rows_of_trace(trace)
    say(console, did_it_pay(trace), "bold")
    for sentence in sentences(trace):
        say(console, sentence)
    console.print(rich_table(rows, str(trace_dir)))
    target = trace_dir.resolve().parent if out is None else out
    if target.is_file() and target.suffix != ".html":
        raise TLTError(f"--out {target} is a file: name a folder, or a page that ends in .html.")
    if any(installed(package) is None for package in PAGE_NEEDS):
        no_page = "No page: pip install 'verl-tlt[report]' to have it drawn."
        if out is not None:
            raise TLTError(no_page)
        say(console, no_page)
        return
    path = target if target.suffix == ".html" else target / PAGE
    say(console, f"Page: {write_page(path, run_page(trace))}")
