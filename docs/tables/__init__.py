"""The tables of README, docs and benchmarks/results, made from the files there by `python docs/generate.py`.

A table stands in its page between `<!-- table: NAME -->` and `<!-- end -->`, NAME being a function of this package.
What is in between is replaced, so that no figure in a table can differ from its file (tests/unit/test_docs.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tables.checks import lossless, resumptions
from tables.control import control_by_batch, off, oracles, race
from tables.drafter import learning, study
from tables.front import expectations, headlines
from tables.page import FILES
from tables.runs import (
    arms,
    cold_start,
    cold_start_rule,
    end_to_end,
    end_to_end_large,
    end_to_end_real,
    end_to_end_real_large,
    savings,
)

ROOT = Path(__file__).parents[2]
__all__ = ["BLOCK", "FILES", "PAGES", "TABLES", "render"]

PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted(FILES.glob("*.md"))]
"""Pages with tables."""
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (arms, cold_start, cold_start_rule, control_by_batch, end_to_end, end_to_end_large, end_to_end_real,
                  end_to_end_real_large, expectations, headlines, learning, lossless, off, oracles, race, resumptions,
                  savings, study)
}  # fmt: skip


def render(page: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda block: f"<!-- table: {block[1]} -->\n{TABLES[block[1]]()}<!-- end -->", page)
