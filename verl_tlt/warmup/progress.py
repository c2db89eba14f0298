"""Which moments of a long stage are worth a line where its output is no terminal, so that no bar moves."""

from __future__ import annotations

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
