"""What the log of a job says: its accept length, and why it failed. Lines of text only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ACCEPTED = re.compile(r"Mean acceptance length: ([\d.]+), .*?Accepted: (\d+) tokens")
ERROR = re.compile(r"(?:^|\s)((?:[\w.]+)?(?:Error|Exception|Refused)\b: .+|verl-tlt: .+)")
LAST_LINES = 15
LONGEST_LINE = 300


def accepted(lines: Iterable[str]) -> float | None:
    """The accept length that vLLM logged for intervals, as one; None: nothing was drafted."""
    tokens = drafts = 0.0
    for line in lines:
        if (match := ACCEPTED.search(line)) and float(match[1]) > 1:
            tokens += int(match[2])
            drafts += int(match[2]) / (float(match[1]) - 1)
    return 1 + tokens / drafts if drafts else None


def failure(what: str, log: Path) -> str:
    """What happened to a job, the cause that its log names, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    last = "\n".join(f"    {strip_colors(line)[:LONGEST_LINE]}" for line in lines[-LAST_LINES:])
    reason = cause(lines)
    return f"{what}{f' Cause: {reason}' if reason else ''}\nThe last lines of {log}:\n{last}"


def cause(lines: Sequence[str]) -> str | None:
    """The last line of a log that names an error, without the prefix Ray puts before it."""
    for line in reversed(lines):
        if (match := ERROR.search(strip_colors(line))) is not None:
            return match[1].strip()
    return None


def strip_colors(line: str) -> str:
    """Without terminal colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)
