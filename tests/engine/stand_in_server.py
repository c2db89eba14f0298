"""Stands for a rollout server in a process of its own, which imports little and so starts soon."""

from typing import Any


class Server:
    """The parts of a rollout server that the fleet calls."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.asleep = self.keeps_weights = False

    def tlt_try_sleep(self, recall: bool) -> bool:
        """Always willing: the gate has its own tests."""
        self.asleep, self.keeps_weights = True, recall
        return True

    def tlt_recall(self) -> None:
        """As the real one."""
        if self.asleep and not self.keeps_weights:
            raise RuntimeError("no weights")
        self.asleep = False

    def sleeps(self) -> bool:
        """Whether it is away."""
        return self.asleep

    def tlt_stage(self, drafter: Any) -> None:
        """Remember the version."""
        self.version = drafter.version

    def staged(self) -> int | None:
        """What was staged last."""
        return self.version
