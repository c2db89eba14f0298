"""mkdocs loads this file while it builds the site (mkdocs.yml). It needs nothing but mkdocs-material."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETUP = Path(__file__).parents[1] / "setup.py"
TERMS = Path(__file__).parent / "how-it-works.md"
"""The page whose section "Terms" explains the terms."""


def on_page_markdown(markdown: str, *, config: Mapping[str, Any], **_: Any) -> str:
    """A page for the built site: links that leave docs/ lead to `repo_url`, or become the file's name without one.

    Terms are given their explanation, which becomes a tooltip.
    """
    linked = str(runpy.run_path(str(SETUP))["linked"](markdown, config.get("repo_url"), "../"))
    return "\n".join([linked, "", *(f"*[{term}]: {meaning}" for term, meaning in terms().items())])


def on_page_content(html: str, **_: Any) -> str:
    """The page with one tooltip for each term, where it stands first; verl's submission gate is another one."""
    seen: set[str] = set()

    def first(term: re.Match[str]) -> str:
        another, meaning, word = term.groups("")
        if another or meaning in seen:
            return f"{another}{word}"
        seen.add(meaning)
        return term[0]

    html = re.sub(r'(submission )?<abbr title="([^"]*)">(.*?)</abbr>', first, html)
    # names break where a word of theirs ends
    return re.sub(r"(?<=<code>)[^<\s]+(?=</code>)", lambda name: name[0].replace("_", "_<wbr>"), html)


def terms() -> dict[str, str]:
    """Each term of the glossary with its meaning, and its plural."""
    glossary = TERMS.read_text(encoding="utf-8").partition("## Terms")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", glossary, re.MULTILINE)[1:])
    return found | {f"{term}s": meaning for term, meaning in found.items() if term.islower()}
