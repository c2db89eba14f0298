"""What a run is doing at this moment, in words, from its trace and its output. Pure: fed with lines and events."""

from collections.abc import Mapping

from verl_tlt.trace.events import Event, LoadSample, Phase, Publish, RunStarted, Step
from verl_tlt.trace.metrics import step_line

STARTUP = (
    ("ray init kwargs", "starting Ray"),
    ("Started a local Ray instance", "starting the trainer"),
    ("TaskRunnerV1 pid=", "loading the trainer"),
    ("WorkerDict pid=", "loading the policy"),
    ("vLLMHttpServer pid=", "loading the rollout engines"),
    ("Training Progress:", "first rollout"),
)
"""Text in verl's output -> what has begun, in the order in which it appears."""

AFTER = {
    "rollout": "log-probs",
    "reward": "log-probs",
    "cold_start": "log-probs",
    "old_log_prob": "policy update",
    "update_actor": "weight sync",
    "update_weights": "closing the step",
}
"""A phase that ended -> what comes next."""


class Progress:
    """The state of one run. Feed it in any order of sources; times are unix seconds."""

    def __init__(self, total: int, now: float) -> None:
        self.total = total
        self.done = 0
        """The last finished step."""
        self._startup = -1
        self._doing, self._since, self._detail = "starting", now, ""

    def status(self, now: float) -> str:
        """One short line: step, what goes on, for how long."""
        step = f"step {self.done + 1}/{self.total}: " if self._startup == len(STARTUP) else ""
        detail = f", {self._detail}" if self._detail else ""
        return f"{step}{self._doing} {max(0.0, now - self._since):.0f} s{detail}"

    def log_line(self, line: str, now: float) -> None:
        """A line of verl's output: tells how far the start is."""
        for i in range(len(STARTUP) - 1, self._startup, -1):
            if STARTUP[i][0] in line:
                self._startup = i
                self._set(STARTUP[i][1], now)
                return

    def event(self, event: Event) -> str | None:
        """An event of the trace; returns the line to print when it finishes a step."""
        if isinstance(event, Step):
            return self.finished(event.step, event.metrics, event.t)
        if isinstance(event, RunStarted):
            self._running(event.t)
        elif isinstance(event, LoadSample) and event.step > self.done:
            self._running(event.t)
            if self._doing != "rollout":
                self._set("rollout", event.t)
            self._detail = f"{' + '.join(str(n) for n in event.inflight.values())} requests in flight"
        elif isinstance(event, Phase) and event.step > self.done and event.name in AFTER:
            self._set(AFTER[event.name], event.end)
        elif isinstance(event, Publish):
            self._detail = f"drafter v{event.version} {event.decision}"
        return None

    def finished(self, step: int, metrics: Mapping[str, float], now: float) -> str | None:
        """A step is over; returns its line, or None if it is known already."""
        if step <= self.done:
            return None
        self._running(now)
        self.done = step
        self._set("rollout" if step < self.total else "saving and shutting down", now)
        return step_line(metrics, step, self.total)

    def _running(self, now: float) -> None:
        if self._startup != len(STARTUP):
            self._startup = len(STARTUP)
            self._set("rollout", now)

    def _set(self, doing: str, now: float) -> None:
        self._doing, self._since, self._detail = doing, now, ""
