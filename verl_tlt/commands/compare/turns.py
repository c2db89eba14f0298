"""Whose turn it is, what earlier turns measured, and how long the rest takes. Numbers and one file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from verl_tlt.commands.compare.arms import CompareError
from verl_tlt.commands.compare.pooled import Step
from verl_tlt.errors import TLTError
from verl_tlt.files.json_files import read_object
from verl_tlt.files.ownership import open_to_append, other_owner, replacing


@dataclass(frozen=True)
class Turn:
    """What one job measured: so many steps of one arm."""

    arm: str
    turn: int
    """From 0 on."""
    steps: list[Step]
    """All but its first, in which everything is used for the first time."""
    seconds: float
    """From the start of the job to its end."""
    first_s: float
    """The first step, its checkpoint apart."""
    checkpoint_s: float
    accept_length: float | None = None
    """Of vLLM's own speculation: vLLM's log over the whole turn."""

    @property
    def start_s(self) -> float:
        """Seconds in which the job started and ended: no step ran."""
        return self.seconds - self.first_s - self.checkpoint_s - sum(step.step_s for step in self.steps)


_TURNS = TypeAdapter(list[Turn])


def schedule(names: Sequence[str], rounds: int) -> Iterator[tuple[str, int]]:
    """(arm, turn) in the order in which turns are taken: it rotates, so that no arm always follows the same one."""
    for turn in range(rounds):
        for place in range(len(names)):
            yield names[(place + turn) % len(names)], turn


class Record:
    """What was measured so far, in a folder that one process at a time has.

    Args:
        folder: its `turns.json` is gone on with.
        asked: what must stay the same for turns to be comparable, by its name on the command line.

    Raises:
        CompareError: the folder holds turns of something else, or another process is writing to it.
    """

    def __init__(self, folder: Path, asked: Mapping[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.fdopen(open_to_append(folder / "turns.lock"), "ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompareError(f"Another comparison is writing to {folder}.") from None
        self.file = folder / "turns.json"
        if reason := other_owner(self.file):
            self._lock.close()
            raise CompareError(f"{self.file} may hold another user's turns: {reason}; give an --out of your own.")
        self._asked: dict[str, object] = json.loads(json.dumps(dict(asked)))
        self.turns: list[Turn] = []
        try:
            if self.file.exists():
                self._go_on()
        except TLTError:
            self._lock.close()
            raise

    def _go_on(self) -> None:
        kept = read_object(self.file)
        try:
            asked, self.turns = dict(kept["asked"]), _TURNS.validate_json(json.dumps(kept["turns"]), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CompareError(f"{self.file} holds no turns of a comparison: turns.{where}: {first['msg']}.") from None
        except (KeyError, TypeError, ValueError) as error:
            raise CompareError(f"{self.file} holds no turns of a comparison: {error!r}.") from error
        for name in asked.keys() & self._asked.keys():
            if asked[name] != self._asked[name]:
                raise CompareError(f"{self.file} was measured with another {name}: give another --out to begin anew.")
        self._asked = {**asked, **self._asked}

    def done(self, arm: str, turn: int) -> bool:
        """Whether that turn was taken."""
        return any((taken.arm, taken.turn) == (arm, turn) for taken in self.turns)

    def add(self, turn: Turn) -> None:
        """Keep one turn; whatever ends this process, the file has it or has it not."""
        self.turns.append(turn)
        with replacing(self.file) as file:
            file.write(json.dumps({"asked": self._asked, "turns": self.rows()}, indent=1).encode())

    def of(self, arm: str) -> list[Turn]:
        """All of an arm."""
        return [turn for turn in self.turns if turn.arm == arm]

    def steps(self, arm: str) -> list[Step]:
        """The steps of all turns of an arm that count."""
        return [step for turn in self.of(arm) for step in turn.steps]

    def rows(self) -> list[dict[str, Any]]:
        """As they are written."""
        return [asdict(turn) for turn in self.turns]

    def seconds_left(self, names: Sequence[str], rounds: int) -> float | None:
        """What the turns that are left take, as long as those before; None: none was taken yet."""
        if not self.turns:
            return None
        known = {name: [turn.seconds for turn in self.of(name)] for name in names}
        usual = mean(turn.seconds for turn in self.turns)
        left = [name for name, turn in schedule(names, rounds) if not self.done(name, turn)]
        return sum(mean(known[name]) if known[name] else usual for name in left)
