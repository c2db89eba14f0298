"""`verl-tlt report`: the HTML page and the picture of a traced run, and its timeline for a trace viewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_tlt.console import make_console
from verl_tlt.errors import TLTError, require
from verl_tlt.report.chrome_trace import write_chrome_trace
from verl_tlt.report.page import Serving, write_report
from verl_tlt.report.reader import RunTrace, read_trace
from verl_tlt.report.summary import StepRow, rich_table, rows_of_trace


def report(trace_dir: Path, out: Path | None, perfetto: Path | None = None) -> int:
    """Write `report.html` and `picture.png` into `out` (the trace directory's parent); returns the exit status.

    Args:
        trace_dir: the run's trace.
        out: folder for page and picture, made if missing.
        perfetto: where a Chrome trace of the run goes too; None: nowhere.
    """
    console = make_console()
    try:
        trace = read_trace(trace_dir)
        rows = rows_of_trace(trace)
        folder = out or trace_dir.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        write_report(folder / "report.html", trace, rows, serving=Serving.of_trace(trace))
        if perfetto is not None:
            perfetto.parent.mkdir(parents=True, exist_ok=True)
            write_chrome_trace(perfetto, trace)
        picture = _picture(folder / "picture.png", trace, rows)
    except (TLTError, OSError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(rich_table(rows, str(trace_dir), console.width))
    if trace.skipped:
        console.print(f"{trace.skipped} lines of the trace could not be read.")
    lines = [picture, f"Report:  {folder / 'report.html'}"]
    lines += [f"Trace:   {perfetto} (open it in ui.perfetto.dev or chrome://tracing)"] if perfetto else []
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 0


def _picture(path: Path, trace: RunTrace, rows: Sequence[StepRow]) -> str:
    """Draw the picture, and say where it is; only it needs a package that an ordinary installation lacks."""
    try:
        require("matplotlib", "report", "The picture")
    except TLTError as missing:
        return str(missing)
    from verl_tlt.report.picture import main_figure, save_png

    return f"Picture: {save_png(main_figure(trace, rows), path)}"
