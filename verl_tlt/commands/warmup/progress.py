"""How far a long stage is: a bar, and where the output is no terminal, so that no bar moves, a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

FIRST_S = 30.0
"""Seconds without a line after which one comes though no tenth is done; twice as many the next time."""


class Lines:
    """Decides when a line is due: at every tenth, and after silences that double. So a stage of a day has some twenty.

    Args:
        now: seconds of any clock that does not go back, as the later calls are told.
    """

    def __init__(self, now: float) -> None:
        self._tenths, self._silence = 0, FIRST_S
        self._latest = now + FIRST_S

    def due(self, share: float, now: float) -> bool:
        """Whether to print one, with that share of the stage done."""
        if (tenths := int(10 * share)) > self._tenths:
            self._tenths = tenths
        elif now < self._latest:
            return False
        else:
            self._silence *= 2
        self._latest = now + self._silence
        return True


def make_bars(console: Console) -> Progress:
    """Where stages are shown."""
    columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    return Progress(*columns, console=console)


class Stage:
    """One stage of a command, which begins now."""

    def __init__(self, bars: Progress, name: str, note: str) -> None:
        self.bars, self._name, self._began = bars, name, time.monotonic()
        self._task, self._lines = bars.add_task(name, total=1.0, note=note), Lines(self._began)

    def tell(self, share: float, note: str) -> None:
        """So much is done: on the bar, and as a line where one is due."""
        now = time.monotonic()
        self.bars.update(self._task, completed=share, note=note)
        if not self.bars.console.is_terminal and self._lines.due(share, now):
            self.say(f"{note} after {now - self._began:.0f} s")

    def say(self, text: str) -> None:
        """A line, on a terminal too."""
        self.bars.console.print(f"{self._name}: {text}", highlight=False, soft_wrap=True)
