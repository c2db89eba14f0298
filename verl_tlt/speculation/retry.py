"""How long what was given up is left alone before it is tried again: speculation, and a replica's spot training."""

from __future__ import annotations

FIRST_WAIT, LONGEST_WAIT = 8, 64
"""RL steps before the first try, and between two tries at most."""


def next_wait(wait: int = 0) -> int:
    """Steps to wait now, after waiting `wait` for a try that failed; 0: it is only being given up."""
    return min(2 * wait, LONGEST_WAIT) if wait else FIRST_WAIT
