"""Memory that a session freed goes back to the system.

A session makes and frees arrays of many sizes, and the C library keeps most of their pages for the process, in pieces.
So a resting worker would hold more than it has, of memory that the actors' offloaded optimizers and checkpoints need.
"""

from __future__ import annotations

import ctypes


def release_freed() -> None:
    """Return whole free pages to the system (glibc's `malloc_trim`); nothing happens with another C library."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
