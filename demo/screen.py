"""What the demo shows while it works: a live line in a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

LOG_EVERY_S = 15.0
"""Seconds between two status lines where there is no terminal to redraw."""


class Screen:
    """A context manager around a long part; `status` may be called as often as one likes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Status | None = None
        self._last = 0.0

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self._live = self.console.status("starting")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        if self._live is not None:
            self._live.update(escape(text))
        elif time.monotonic() - self._last >= LOG_EVERY_S:
            self._last = time.monotonic()
            self.line(f"... {text}")
