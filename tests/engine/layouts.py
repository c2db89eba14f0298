"""Layouts of verl's engines as parameters of tests: cases of a table, some of them heavy, run by one group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def layouts(cases: Mapping[str, Any], which: Callable[[Any], Any] = lambda case: True) -> list[Any]:
    """Parameters for `name`, of the cases for which `which` holds."""
    return [
        pytest.param(name, marks=[pytest.mark.heavy] if case.heavy else [])
        for name, case in cases.items()
        if which(case)
    ]


def wanted(request: pytest.FixtureRequest, cases: Mapping[str, Any]) -> list[str]:
    """The cases that the tests of this file which were selected ask for: no others need to run."""
    mine = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = {item.callspec.params.get("name") for item in mine if hasattr(item, "callspec")}
    return [name for name in cases if name in asked]
