"""Reads the trace of a run that is still going: each poll returns the events that are new."""

from collections import Counter
from pathlib import Path

from verl_tlt.commands.report.reader import parse_event, record_of
from verl_tlt.trace.events import ENGINE_PREFIX, Event


class TraceTail:
    """The events of a trace directory as they arrive; engine steps are left out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read = Counter[Path]()  # bytes by file

    def poll(self) -> list[Event]:
        """Events whose lines were completed since the last call, in the order of time."""
        events: list[Event] = []
        for path in self.directory.glob("*.jsonl"):
            if path.name.startswith(ENGINE_PREFIX):
                continue
            with path.open("rb") as file:
                file.seek(self._read[path])
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read[path] += len(complete)
            events += filter(None, (parse_event(record_of(line)) for line in complete.splitlines()))
        return sorted(events, key=lambda event: event.t)
