"""What the log of a job says: its accept length, and why it failed. Lines of text only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ACCEPTED = re.compile(r"Mean acceptance length: ([\d.]+), .*?Accepted: (\d+) tokens, Drafted: (\d+) tokens")
ERROR = re.compile(r"(?:^|\s)((?:[\w.]+)?(?:Error|Exception|Refused)\b: .+|verl-tlt: .+)")
LAST_LINES = 15
LONGEST_LINE = 300


def accepted(lines: Iterable[str]) -> float | None:
    """The accept length that vLLM logged for intervals, as one; None: nothing was drafted.

    How many drafts an interval had follows from its accept length, unless nothing was accepted in it: then it is taken
    to have had drafts as long as those of the others.
    """
    found = [(float(m[1]), int(m[2]), int(m[3])) for line in lines if (m := ACCEPTED.search(line))]
    told = [(tokens, tokens / (length - 1), drafted) for length, tokens, drafted in found if length > 1]
    if not told:
        return 1.0 if any(drafted for _, _, drafted in found) else None
    tokens, drafts, drafted = map(sum, zip(*told, strict=True))
    of_none = sum(drafted for length, _, drafted in found if length <= 1)
    return 1 + tokens / (drafts * (1 + of_none / drafted))


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
