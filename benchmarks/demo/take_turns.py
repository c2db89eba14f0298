"""Two verl runs on one machine take turns, step by step: each waits where it would fetch its next prompts.

A machine that others use changes its speed from minute to minute, and a run takes minutes. Runs that alternate after
every step are compared within one. `data.custom_cls.path` names this file in both; they meet in a directory:
`ready-NAME` says that a run has started up, `turn` whose turn it is, `waited-NAME` holds a line of seconds per step,
which verl counts as part of the step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

POLL_S = 0.02


def give(directory: Path, name: str) -> None:
    """It is `name`'s turn from now on."""
    scratch = directory / f".turn-{os.getpid()}"
    scratch.write_text(name)
    scratch.replace(directory / "turn")


class TakeTurns(RLHFDataset):
    """verl's dataset; the first prompt of every batch is handed out when it is this run's turn.

    Three keys of its own: `data.turns` (the directory), `data.name` and `data.other` (this run's name and the other's).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directory = Path(self.config["turns"])
        self._name, self._other = self.config["name"], self.config["other"]
        self._batch, self._served = int(self.config["train_batch_size"]), 0

    def __getitem__(self, item: int) -> dict[str, Any]:
        if self._served % self._batch == 0:
            self._take_turn()
        self._served += 1
        return super().__getitem__(item)

    def _take_turn(self) -> None:
        begin = time.monotonic()
        if self._served == 0:
            (self._directory / f"ready-{self._name}").touch()
            while not (self._directory / f"ready-{self._other}").exists():
                time.sleep(POLL_S)
        else:
            give(self._directory, self._other)
        while (self._directory / "turn").read_text() != self._name:
            time.sleep(POLL_S)
        with (self._directory / f"waited-{self._name}").open("a") as file:
            file.write(f"{time.monotonic() - begin}\n")
