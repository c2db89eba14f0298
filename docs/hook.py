"""mkdocs loads this file while it builds the site (mkdocs.yml). It needs nothing but mkdocs-material."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETUP = Path(__file__).parents[1] / "setup.py"


def on_page_markdown(markdown: str, *, config: Mapping[str, Any], **_: Any) -> str:
    """A page for the built site: links that leave docs/ lead to `repo_url`, or become the file's name without one."""
    return str(runpy.run_path(str(SETUP))["linked"](markdown, config.get("repo_url"), "../"))
