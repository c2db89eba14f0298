"""The tables of README, docs and benchmarks/results, made from the files there by `python docs/generate.py`.

A table stands in its page between `<!-- table: NAME FILE -->` and `<!-- end -->`. NAME is a function of this package,
and FILE the result that it reads, if it reads any. What is in between is replaced, so that no figure in a table can
differ from its file (tests/unit/test_docs.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tables.front import expectations, headlines
from tables.page import FILES, source
from tables.parts import along, lossless, oracles, race, resumptions
from tables.runs import arms, end_to_end

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted(FILES.glob("*.md"))]
"""Pages with tables."""
BLOCK = re.compile(r"<!-- table: (\w+) ?(\w*) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLES: dict[str, Callable[..., str]] = {
    table.__name__: table
    for table in (along, arms, end_to_end, expectations, headlines, lossless, oracles, race, resumptions, source)
}


def render(page: str) -> str:
    """The page with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        name, file, _ = found.groups()
        table = TABLES[name](*([file] if file else []))
        return f"<!-- table: {' '.join(filter(None, (name, file)))} -->\n{table}<!-- end -->"

    return BLOCK.sub(block, page)
