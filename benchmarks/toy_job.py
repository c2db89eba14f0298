"""One GRPO job of the demo's recipe, for benchmarks that treat whole jobs badly, or compare many.

Response lengths can be forced (`FORCED`), so that a replica runs dry long before another in nearly every step.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.trace_tail import TraceTail
from tests.toy.assets import Assets, build_assets
from verl_tlt.commands.processes import ProcessTree
from verl_tlt.trace.events import Event

RECIPE = Path(__file__).parents[1] / "demo" / "demo_grpo.sh"
SAMPLES = 4
"""Responses of a prompt."""
FORCED = "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length"
"""Override of the jobs whose responses are as long as their prompts' rows say (`tests.toy.agent`)."""

CONSTANT = "++actor_rollout_ref.rollout.custom.tlt"
"""Where an override of a small job changes what is no setting (`verl_tlt.config.constant`)."""
QUICK_TO_LEARN = (
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    f"{CONSTANT}.drafter.warmup_steps=5",
    f"{CONSTANT}.drafter.batch_tokens=512",
    f"{CONSTANT}.buffer.min_tokens=300",
)
"""Overrides of TLT by which something is trained in nearly every step of a small job."""
NO_CLUSTER = "+ray_kwargs.ray_init.address=local"
"""Override by which a job starts a Ray of its own, whatever cluster there is."""
SETTLE_S = 20.0
"""Ray's daemons end some seconds after the run."""


def make_assets(folder: Path, lengths: Callable[[int], Sequence[int]], rows: int = 64) -> Assets:
    """Policy and prompts below `folder`; response i of prompt number `index` has `lengths(index)[i]` tokens."""
    assets = build_assets(folder, width="small", train_rows=rows, val_rows=8)
    table = pq.read_table(assets.train).to_pylist()
    for index, row in enumerate(table):
        row["extra_info"]["forced_lengths"] = list(lengths(index))
    pq.write_table(pa.Table.from_pylist(table), assets.train)
    return assets


def recipe_environment(out: Path, assets: Assets, steps: int, **environment: str) -> dict[str, str]:
    """What `demo_grpo.sh` reads, with this interpreter and without anybody's Ray cluster; `environment` wins."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(out),
        "ASSETS": str(assets.policy.parent),
        "POLICY": str(assets.policy),
        "STEPS": str(steps),
        "DTYPE": "float32",
        **environment,
    }
    env.pop("RAY_ADDRESS", None)
    return env


def toy_overrides(assets: Assets) -> tuple[str, ...]:
    """What is changed in the demo's recipe in all of these jobs."""
    return (
        "data.shuffle=False",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets.agent_loop}",
    )


class Job:
    """A job of its own Ray cluster, followed by its trace; it ends by itself after so many steps.

    A folder `out` that holds checkpoints is resumed from. `environment` is that of the recipe (`demo_grpo.sh`).
    """

    def __init__(self, out: Path, assets: Assets, steps: int, overrides: Sequence[str], **environment: str) -> None:
        self.out, self.log = out, out / "verl.log"
        out.mkdir(parents=True, exist_ok=True)
        self._said = self.log.stat().st_size if self.log.exists() else 0
        self._trace = TraceTail(out / "trace")
        self._trace.poll()  # what earlier jobs wrote
        env = recipe_environment(out, assets, steps, **environment)
        command = [str(RECIPE), *toy_overrides(assets), *overrides]
        self.tree = ProcessTree(command, env=env, log=self.log, cwd=out)
        self._known = self.processes()

    def said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._said)
            return file.read().decode(errors="replace")

    def events(self, limit_s: float, poll_s: float = 0.01) -> Iterator[Event]:
        """The trace as it is written, until the job has ended; TimeoutError after `limit_s` seconds without a line."""
        last = time.monotonic()
        while True:
            ended = self.tree.process.poll() is not None
            for event in self._trace.poll():
                last = time.monotonic()
                yield event
            if ended:
                return
            if time.monotonic() - last > limit_s:
                raise TimeoutError(f"{self.out} has written nothing for {limit_s:.0f} s; see {self.log}")
            time.sleep(poll_s)

    def wait(self, limit_s: float, look: Callable[[], None] = lambda: None) -> int | None:
        """Its exit status once it has ended; `look` is called every second until then.

        None: it is still running after so many seconds. Its processes say where they stand (faulthandler, into the
        log), if the job's environment has PYTHONFAULTHANDLER.
        """
        deadline = time.monotonic() + limit_s
        while (status := self.tree.process.poll()) is None and time.monotonic() < deadline:
            self.processes()
            look()
            time.sleep(1)
        if status is None:
            for process in self.tree.alive():
                if process.pid != self.tree.process.pid and "ray::" in process.name():
                    process.send_signal(signal.SIGABRT)
            time.sleep(2)
        return status

    def left(self) -> list[str]:
        """Processes and files that a job that has ended by itself has not cleared away."""
        deadline = time.monotonic() + SETTLE_S
        while (alive := self.tree.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        folder = self.tree.folder
        files = [path for path in folder.iterdir() if path.name != "ray" and not _only_locks(path)]  # Ray's logs stay
        return sorted([*(f"process {_name(p)}" for p in alive), *map(str, files)])

    def processes(self) -> list[psutil.Process]:
        """All that are alive; call it now and then, or detached processes are not found later."""
        self._known = self.tree.alive()
        return self._known

    def kill(self) -> None:
        """SIGKILL to every process at once, as a machine that fails; then what they left outside their folder goes.

        At once: those of the last look, since another one would take a tenth of a second; who is younger follows.
        """
        for process in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        if left := self.tree.stop():
            raise RuntimeError(f"these processes could not be ended: {left}")
        with contextlib.suppress(ChildProcessError):  # orphans are this process's children, and zombies until then
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _only_locks(path: Path) -> bool:
    """Whether it is the package's temporary folder with locks alone, which the next run takes again (`private_dir`)."""
    ours = path.name == f"verl-tlt-{os.getuid()}"
    return ours and all(file.suffix == ".lock" for file in path.iterdir())


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "that has just ended"
