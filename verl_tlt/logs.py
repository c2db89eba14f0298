"""Where the log lines of TLT's own processes go."""

from __future__ import annotations

import logging
import os
import sys


def log_to_stderr() -> None:
    """Send TLT's messages to stderr, whatever libraries do to the root logger, as verl does with its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    root = logging.getLogger("verl_tlt")
    root.handlers, root.propagate = [handler], False
    root.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
