"""`verl-tlt report`: the page and the picture of a traced run, and its timeline for a trace viewer."""

from __future__ import annotations

from pathlib import Path

from verl_tlt.console import make_console
from verl_tlt.errors import TLTError, require
from verl_tlt.report.chrome_trace import write_chrome_trace
from verl_tlt.report.reader import read_trace
from verl_tlt.report.rows import rich_table, rows_of_trace


def report(trace_dir: Path, out: Path | None, perfetto: Path | None = None) -> int:
    """Print the steps as a table and write `report.html` and `picture.png`; returns the exit status.

    Args:
        trace_dir: the run's trace.
        out: folder of page and picture, made if missing; None: the trace directory's parent.
        perfetto: file for a Chrome trace of the run; None: none is written.
    """
    console = make_console()
    folder = out or trace_dir.resolve().parent
    try:
        trace = read_trace(trace_dir)
        console.print(rich_table(rows_of_trace(trace), str(trace_dir)))
        if trace.skipped:
            console.print(f"{trace.skipped} lines of the trace could not be read.")
        if perfetto is not None:
            perfetto.parent.mkdir(parents=True, exist_ok=True)
            write_chrome_trace(perfetto, trace)
            said = f"Trace:   {perfetto} (open it in ui.perfetto.dev or chrome://tracing)"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        for package in ("matplotlib", "jinja2"):
            require(package, "report", "verl-tlt report")
        from verl_tlt.report.figures import save_picture
        from verl_tlt.report.page import write_page

        folder.mkdir(parents=True, exist_ok=True)
        picture = save_picture(folder / "picture.png", trace)
        page = write_page(folder / "report.html", trace)
    except (TLTError, OSError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(f"Picture: {picture}\nReport:  {page}", markup=False, highlight=False, soft_wrap=True)
    return 0
