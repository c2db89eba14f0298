"""`verl-tlt report`: the HTML page and the picture of a traced run."""

from __future__ import annotations

from pathlib import Path

from verl_tlt.console import make_console
from verl_tlt.errors import TLTError, require
from verl_tlt.report.reader import read_trace
from verl_tlt.report.summary import rich_table, rows_of_trace


def report(trace_dir: Path, out: Path | None) -> int:
    """Write `report.html` and `picture.png` into `out` (the trace directory's parent); returns the exit status."""
    console = make_console()
    try:
        require("matplotlib", "report", "The report")
        from verl_tlt.report.page import Serving, write_report
        from verl_tlt.report.picture import main_figure, save_png

        trace = read_trace(trace_dir)
        rows = rows_of_trace(trace)
        folder = out or trace_dir.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        save_png(main_figure(trace, rows), folder / "picture.png")
        write_report(folder / "report.html", trace, rows, serving=Serving.of_trace(trace))
    except (TLTError, OSError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(rich_table(rows, str(trace_dir), console.width))
    if trace.skipped:
        console.print(f"{trace.skipped} lines of the trace could not be read.")
    console.print(
        f"Picture: {folder / 'picture.png'}\nReport:  {folder / 'report.html'}", highlight=False, soft_wrap=True
    )
    return 0
