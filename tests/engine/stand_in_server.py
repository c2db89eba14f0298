"""Stands for a rollout server in a process of its own, which imports little and so starts soon."""


class Server:
    """The parts of a rollout server that the fleet calls."""

    def __init__(self) -> None:
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
