"""Containment of TLT's own failures: they cost speed, not the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Guard:
    """Contains TLT's own failures, and counts them by what failed (`tlt/errors`).

    Each kind is logged in full the first time, and in one line after that.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """A failure inside is logged, counted under `what`, and goes no further."""
        try:
            yield
        except Exception as error:
            self.counts[what] += 1
            if self.counts[what] == 1:
                logger.exception("TLT: %s failed; the run goes on without it", what)
            else:
                logger.error("TLT: %s failed again (%d times): %s", what, self.counts[what], error)

    def count(self, what: str, failures: int) -> None:
        """Add failures that were logged where they happened."""
        if failures:
            self.counts[what] += failures
