"""One GRPO run of the demo's recipe as a child process: started, watched, and taken down whatever happens."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from demo.follow import Tail, TraceTail
from demo.machine import DemoError
from demo.progress import Progress
from demo.screen import Screen
from verl_tlt.commands.compare.job import failure
from verl_tlt.commands.processes import running

POLL_S = 1.0
STALL_S = 900.0
"""Seconds without any sign of life after which a run counts as hung."""
MARKER = ".verl-tlt-demo"
"""File that says a folder is the demo's own, to be emptied without asking."""


@dataclass(frozen=True)
class DemoRun:
    """One run: with TLT or stock, from a random head or from a drafter."""

    title: str
    out: Path
    """Folder of this run alone; emptied first."""
    steps: int
    seed: int
    tlt: bool = True
    drafter: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """What the recipe needs to know besides."""

    @property
    def log(self) -> Path:
        """All output of verl, Ray and vLLM."""
        return self.out / "verl.log"

    @property
    def trace(self) -> Path:
        """The trace directory of a run with TLT."""
        return self.out / "trace"

    @property
    def metrics(self) -> Path:
        """Where verl's `file` logger writes."""
        return self.out / "metrics.jsonl"

    def environment(self) -> dict[str, str]:
        """The recipe's environment: this interpreter, a Ray of its own, and the run's settings."""
        env = {**os.environ, **self.env}
        env.pop("RAY_ADDRESS", None)  # never join a cluster that happens to be configured
        env |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "OUT": str(self.out),
            "STEPS": str(self.steps),
            "SEED": str(self.seed),
            "TLT": "1" if self.tlt else "0",
            "DRAFTER": str(self.drafter or ""),
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
        }
        return env


def run_recipe(run: DemoRun, recipe: Path, screen: Screen, stall_s: float = STALL_S) -> None:
    """Run the recipe to its end, a line per step. On any way out, Ctrl-C included, no process is left behind.

    Raises:
        DemoError: it failed, hung or stopped early; the message holds the cause, the last lines and the log's path.
    """
    _empty(run.out)
    started = time.time()
    progress = Progress(run.steps, started)
    screen.line(f"{run.title}: {run.steps} steps, output of verl in {run.log}")
    with running(["bash", str(recipe)], env=run.environment(), log=run.log) as tree:
        watch = _Watch(run, progress, screen)
        while (code := tree.process.poll()) is None:
            if time.time() - watch.poll() > stall_s:
                raise DemoError(failure(f"Nothing has happened for {stall_s:.0f} s: the run hangs.", run.log))
            tree.alive()
            time.sleep(POLL_S)
        watch.poll()
    if code:
        raise DemoError(failure(f"The run failed with exit status {code}.", run.log))
    if progress.done < run.steps:
        raise DemoError(failure(f"The run ended after {progress.done} of {run.steps} steps.", run.log))
    screen.line(f"{run.title}: done in {time.time() - started:.0f} s")


class _Watch:
    """Feeds a run's files to its progress, and shows it."""

    def __init__(self, run: DemoRun, progress: Progress, screen: Screen) -> None:
        self._log, self._metrics, self._trace = Tail(run.log), Tail(run.metrics), TraceTail(run.trace)
        self._progress, self._screen = progress, screen
        self._alive_at = time.time()

    def poll(self) -> float:
        """Take in what is new; returns when there was something new last (unix seconds)."""
        now = time.time()
        lines, events, metrics = self._log.poll(), self._trace.poll(), self._metrics.poll()
        if lines or events or metrics:
            self._alive_at = now
        for line in lines:
            self._progress.log_line(line, now)
        finished = [self._progress.event(event) for event in events]
        for line in metrics:
            record = json.loads(line)
            if "timing_s/step" in record["data"]:
                finished.append(self._progress.finished(record["step"], record["data"], now))
        for text in finished:
            if text:
                self._screen.line(text)
        self._screen.status(self._progress.status(now))
        return self._alive_at


def _empty(out: Path) -> None:
    """Make the folder, empty. Refuse to delete what the demo did not make."""
    if out.exists():
        if any(out.iterdir()) and not (out / MARKER).exists():
            raise DemoError(f"{out} exists and was not made by the demo: choose another --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()
