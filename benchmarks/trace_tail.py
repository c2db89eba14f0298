"""Reads files that others are still writing: each poll returns what is new, complete lines only."""

import json
from pathlib import Path

from verl_tlt.commands.report.reader import parse_event
from verl_tlt.trace.events import ENGINE_PREFIX, Event


class Tail:
    """The lines of one file as they arrive; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[str]:
        """Lines completed since the last call, without their newline."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        end = text.rfind(b"\n") + 1
        self._offset += end
        return text[:end].decode(errors="replace").splitlines()


class TraceTail:
    """The events of a trace directory as they arrive; engine steps are left out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Tail] = {}

    def poll(self) -> list[Event]:
        """Events written since the last call, in the order of time."""
        for path in self.directory.glob("*.jsonl"):
            if not path.name.startswith(ENGINE_PREFIX):
                self._files.setdefault(path, Tail(path))
        events = []
        for line in (line for file in self._files.values() for line in file.poll()):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # half a line of a killed process; the reader counts these
            if isinstance(record, dict) and (event := parse_event(record)) is not None:
                events.append(event)
        return sorted(events, key=lambda event: event.t)
