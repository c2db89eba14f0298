"""`verl-tlt report`: the page and the picture of a traced run."""

import os
from importlib.util import find_spec
from pathlib import Path

from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.report.reader import TraceError, read_trace
from verl_tlt.commands.report.steps import rich_table, rows_of_trace, sentences
from verl_tlt.errors import TLTError, printable


def report(trace_dir: Path, out: Path | None) -> None:
    """Print the steps as a table, and write `report.html` and `picture.png` to `out`; None: beside the trace."""
    console, folder, trace = make_console(), out or _beside(trace_dir), read_trace(trace_dir)
    for sentence in sentences(trace):
        say(console, sentence)
    console.print(rich_table(rows_of_trace(trace), printable(str(trace_dir))))
    try:
        for package in ("matplotlib", "jinja2"):
            if find_spec(package) is None:
                install = "pip install matplotlib jinja2"
                raise TLTError(f"verl-tlt report needs {package}, which is not installed: {install}.")
        from verl_tlt.commands.report.figures import save_picture
        from verl_tlt.commands.report.page import write_page

        folder.mkdir(parents=True, exist_ok=True)
        picture = save_picture(folder / "picture.png", trace)
        page = write_page(folder / "report.html", trace)
    except OSError as error:
        raise TraceError(str(error)) from error
    say(console, f"Picture: {picture}\nReport:  {page}")


def _beside(trace_dir: Path) -> Path:
    """The folder that the trace lies in, where that is this user's or root's."""
    folder = Path(os.path.realpath(trace_dir)).parent
    try:
        owner = folder.stat().st_uid
    except OSError as error:
        raise TraceError(f"{folder} cannot be written to: {error.strerror}.") from error
    if owner not in (0, os.geteuid()):
        raise TraceError(f"{folder} belongs to user {owner}; say with --out where page and picture are to go.")
    return folder
