"""What the turns of a comparison measured, kept in a file with which a comparison that is called again goes on."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import TypeAdapter

from verl_tlt.commands.lock import take_lock
from verl_tlt.commands.report.steps import step_row
from verl_tlt.errors import TLTError
from verl_tlt.files.disk import replacing

STEP = "global_step_"
"""How verl names the folder of a checkpoint."""


class CompareError(TLTError):
    """A comparison cannot be made as it was asked for, or a job of it failed."""


@dataclass(frozen=True)
class Step:
    turn: int
    step: int
    step_s: float
    rollout_s: float
    tokens: float
    """Tokens of all responses."""
    reward: float | None
    """None: it was not a number."""
    accept_length: float | None = None
    saved_s: float | None = None
    draft_length: float | None = None
    """Mean K of the engine steps; None: the run has no TLT."""
    prompt: float | None = None
    """Mean tokens of the step's prompts: steps that differ in it had other prompts."""
    probs_diff_max: float | None = None
    """Largest difference between a token's probability in the rollout and in the actor."""


@dataclass(frozen=True)
class Turn:
    """Measurements of one job, which ran some steps of one arm."""

    arm: str
    turn: int
    """Number of the turn, from 0 on."""
    steps: list[Step]
    """All steps but the first, in which everything is used for the first time."""
    seconds: float
    """Seconds from the start of the job to its end."""
    first_s: float
    """Seconds of the first step, its checkpoint apart."""
    checkpoint_s: float
    accept_length: float | None = None
    """Accept length of vLLM's own speculation, from vLLM's log of the whole turn."""

    @property
    def start_s(self) -> float:
        """Seconds in which the job started and ended: no step ran."""
        return self.seconds - self.first_s - self.checkpoint_s - sum(step.step_s for step in self.steps)


_TURNS = TypeAdapter(list[Turn])


def read_step(turn: int, step: int, metrics: Mapping[str, float]) -> Step:
    """A step by verl's metrics; the time of its checkpoint is not counted."""
    row = step_row(metrics)
    needed = {name: row[name] for name in ("step_s", "rollout_s", "tokens")}
    if missing := [name for name, value in needed.items() if value is None]:
        raise CompareError(f"verl logged no {' and no '.join(missing)} for step {step}, which is what is compared.")
    known = {name: float(value or 0.0) for name, value in needed.items()}
    known["step_s"] -= metrics.get("timing_s/save_checkpoint", 0.0)
    return Step(
        turn=turn,
        step=step,
        **known,
        reward=row["reward"],
        accept_length=metrics.get("tlt/accept_length"),
        saved_s=metrics.get("tlt/saved_estimate_s"),
        draft_length=metrics.get("tlt/draft_length_mean"),
        prompt=metrics.get("prompt_length/mean"),
        probs_diff_max=row["probs_diff_max"],
    )


def schedule(arms: Iterable[str], rounds: int) -> Iterator[tuple[str, int]]:
    """(arm, turn) in the order in which turns are taken: it rotates, so that no arm always follows the same one."""
    names = list(arms)
    for turn in range(rounds):
        for place in range(len(names)):
            yield names[(place + turn) % len(names)], turn


def _change(then: object, now: object) -> str:
    """What a value was and what it is; of lists only the words in which they differ."""
    if isinstance(then, list) and isinstance(now, list):
        removed = [word for word in then if word not in now]
        added = [word for word in now if word not in then]
        if not removed and not added:
            return "in another order"
        return f"{' '.join(removed) or 'nothing'} then, {' '.join(added) or 'nothing'} now"
    return f"{then} then, {now} now"


class Record:
    """The turns measured so far, in the `turns.json` of a folder that one process at a time uses.

    `asked` has the settings that must be the same in all turns, by names that users know. A CompareError says which of
    them are others than in the file.
    """

    def __init__(self, folder: Path, asked: Mapping[str, object]) -> None:
        busy = f"Another comparison, or a job that a killed one left running, is writing to {folder}."
        self.lock = take_lock(folder / "turns.lock", busy)
        self.file = folder / "turns.json"
        self.turns: list[Turn] = []
        self._asked: dict[str, object] = json.loads(json.dumps(dict(asked)))
        try:
            self._load()
        except TLTError:
            self.lock.close()
            raise

    def _load(self) -> None:
        """Read the turns of an earlier call; make the file if there is none."""
        if not self.file.exists():
            checkpoints = list(self.file.parent.glob(f"*/{STEP}*"))
            if checkpoints:
                raise CompareError(f"{checkpoints[0]} is of no comparison, which would remove it: give another --out.")
            self._write()
            return
        try:
            kept = json.loads(self.file.read_text())
            asked = dict(kept["asked"])
            self.turns = _TURNS.validate_python(kept["turns"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"{self.file} holds no jobs of a comparison"
            raise CompareError(f"{what}: give another --out to begin anew.") from error
        if not self.turns:
            return
        changed = [name for name, value in self._asked.items() if name in asked and asked[name] != value]
        if changed:
            changes = [f"another {name} ({_change(asked[name], self._asked[name])})" for name in changed]
            what = f"{self.file} was measured with {' and '.join(changes)}"
            raise CompareError(f"{what}: go back to that, or give another --out to begin anew.")
        self._asked = {**asked, **self._asked}

    def left(self, arms: Iterable[str], rounds: int) -> list[tuple[str, int]]:
        """The part of the schedule that is not taken yet."""
        taken = {(turn.arm, turn.turn) for turn in self.turns}
        return [place for place in schedule(arms, rounds) if place not in taken]

    def add(self, turn: Turn) -> None:
        """Keep one turn; whatever ends this process, the file has it or has it not."""
        self.turns.append(turn)
        self._write()

    def _write(self) -> None:
        with replacing(self.file) as file:
            file.write(json.dumps({"asked": self._asked, "turns": self.rows()}, indent=1).encode())

    def of(self, arm: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.arm == arm]

    def steps(self, arm: str) -> list[Step]:
        """An arm's steps that can be compared by token: those in which something was written."""
        return [step for turn in self.of(arm) for step in turn.steps if step.tokens]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(turn) for turn in self.turns]

    def seconds_left(self, arms: Iterable[str], rounds: int) -> float | None:
        """Seconds of the turns that are left, if they take as long as those before; None: none was taken yet."""
        if not self.turns:
            return None
        seconds = 0.0
        for arm, _ in self.left(arms, rounds):
            like_it = self.of(arm) or self.turns  # those of other arms, if it took none yet
            seconds += mean(turn.seconds for turn in like_it)
        return seconds
