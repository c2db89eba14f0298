"""Writes an HTML page that stands alone: it loads nothing and runs no script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from verl_tlt.commands.report.charts import Chart


@dataclass(frozen=True)
class PageTable:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    heading: str
    answer: str
    """The first sentence, in bold."""
    sentences: Sequence[str]
    about: str
    """What ran, where and when."""
    facts: Mapping[str, str]
    """Numbers at the top of the page, with their units, by name."""
    charts: Sequence["Chart"]
    tables: Sequence[PageTable]


def write_page(path: Path, page: Page) -> Path:
    """Write the page and return its path. Texts are escaped."""
    from jinja2 import Environment, StrictUndefined  # of the extra: without it `report` still prints

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.render(page=page), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise TLTError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path
