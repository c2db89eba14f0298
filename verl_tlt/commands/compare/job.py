"""One turn of one arm: a job goes on from the arm's last checkpoint for some steps; then its processes are ended."""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from verl_tlt.checks.recipe import cluster_file
from verl_tlt.commands.compare.plan import Arm, Plan
from verl_tlt.commands.compare.record import STEP, CompareError, Turn, read_step
from verl_tlt.commands.console import last_lines, lines_of
from verl_tlt.commands.processes import running
from verl_tlt.commands.run_metrics import read_run
from verl_tlt.flag import MAIN

LOOK_S = 1.0
FILE_LOGGER = "VERL_FILE_LOGGER_PATH"
ACCEPTED = re.compile(r"Mean acceptance length: ([\d.]+), .*?Accepted: (\d+) tokens, Drafted: (\d+) tokens")
ERROR = re.compile(r"(?:^|\s)((?:[\w.]+)?(?:Error|Exception|Refused)\b: .+|verl-tlt: .+)")


def take_turn(
    plan: Plan, arm: Arm, turn: int, stall_s: float, tell: Callable[[int], None], lock: Sequence[int] = ()
) -> Turn:
    """Run turn number `turn` (from 0 on) of `arm`; a CompareError names the log of a job that failed or hangs.

    One that logs nothing for `stall_s` seconds hangs; `tell` is called once a second with the number of finished steps.
    The job keeps the `lock`, an open file, so that no other begins before it has ended.
    """
    home = plan.folder / arm.name
    begin = plan.checkpoint(arm, turn)
    if begin is not None and not begin.is_dir():
        raise CompareError(f"{begin}, from which {arm.name} is to go on, is gone: give another --out to begin anew.")
    home.mkdir(parents=True, exist_ok=True)
    keep_only(home, begin)
    log = home / f"job-{turn + 1}.log"
    metrics = home / f"job-{turn + 1}.jsonl"
    for old in (log, metrics):
        old.unlink(missing_ok=True)
    shutil.rmtree(ray_logs_of(log), ignore_errors=True)
    command, env = plan.job(arm, turn, {FILE_LOGGER: str(metrics)})
    folder = Path("." if plan.command else plan.recipe.directory or ".")
    began = time.monotonic()

    def finished() -> int:
        steps = len(read_rows(metrics))
        tell(steps)
        return steps

    code = watched(arm.name, command, with_cluster(env), log, folder, stall_s, finished, lock)
    seconds = time.monotonic() - began
    rows = read_rows(metrics)
    if code or len(rows) != plan.steps:
        what = f"failed with exit status {code}" if code else f"ended after {len(rows)} of {plan.steps} steps"
        raise CompareError(failure(f"{arm.name} {what}.", log))
    shutil.rmtree(ray_logs_of(log), ignore_errors=True)
    steps = [read_step(turn, step, row) for step, row in rows.items()]
    saved = sum(row.get("timing_s/save_checkpoint", 0.0) for row in rows.values())
    logged = accept_length_of(log.read_text(errors="replace").splitlines()) if arm.own_speculation else None
    return Turn(arm.name, turn, steps[1:], seconds, steps[0].step_s, saved, logged)


def watched(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    folder: Path,
    stall_s: float,
    look: Callable[[], object],
    keeps: Sequence[int] = (),
) -> int:
    """Run a command in `folder`, its output in `log`, to its end, and return its exit status; its whole tree is ended.

    `look` is called once a second. The command keeps the open files `keeps`. A CompareError says that for `stall_s`
    seconds nothing was written, and `look` returned the same.
    """
    with running(command, env=env, log=log, cwd=folder, keeps=keeps) as tree:
        seen: tuple[int, object] | None = None
        changed_at = time.monotonic()
        while (code := tree.status(MAIN)) is None:
            progress = (log.stat().st_size, look())
            if progress != seen:
                seen = progress
                changed_at = time.monotonic()
            if time.monotonic() - changed_at > stall_s:
                keep_ray_logs(tree.folder, log)
                raise CompareError(failure(f"{name} has written nothing for {stall_s:.0f} s.", log))
            time.sleep(LOOK_S)
        keep_ray_logs(tree.folder, log)
        return code


def keep_ray_logs(folder: Path, log: Path) -> None:
    """Copy what Ray logged of a job out of its temporary folder, which is removed, to beside the job's log."""
    for logs in folder.glob("ray/session_*_*/logs"):
        with contextlib.suppress(OSError):  # the job's own log says more
            shutil.copytree(logs, ray_logs_of(log), ignore_dangling_symlinks=True, dirs_exist_ok=True)


def ray_logs_of(log: Path) -> Path:
    return log.with_suffix(".ray")


def with_cluster(environment: dict[str, str]) -> dict[str, str]:
    """A job's environment with what Ray needs to find a cluster that was started here."""
    # Ray would drop lines of one replica that are like another's, such as those with vLLM's accept length.
    env = {**environment, "RAY_DEDUP_LOGS": "0"}
    file = cluster_file(env)
    if file.exists():
        env["RAY_TMPDIR"] = str(file.parent.parent)  # else the job's temporary folder hides the cluster
    return env


def keep_only(home: Path, checkpoint: Path | None) -> None:
    """Remove an arm's other checkpoints: those before, and what a turn that was killed left."""
    for path in home.glob(f"{STEP}*"):
        if path != checkpoint:
            shutil.rmtree(path)


def read_rows(metrics: Path) -> dict[int, dict[str, float]]:
    """Metrics of finished RL steps, by step, as verl's `file` logger wrote them."""
    if not metrics.exists():
        return {}
    return {step: row for step, row in read_run(metrics).steps.items() if "timing_s/step" in row}


def accept_length_of(lines: Iterable[str]) -> float | None:
    """Mean accept length of all drafts, of which vLLM logs the mean in intervals; None: nothing was drafted.

    The number of an interval's drafts follows from its accept length, unless nothing was accepted in it: then its
    drafts are taken to be as long as those of the other intervals.
    """
    drafts = 0.0
    accepted_tokens = 0
    drafted_tokens = 0  # in intervals in which some were accepted
    rejected_tokens = 0  # in intervals in which none was accepted
    for line in lines:
        match = ACCEPTED.search(line)
        if match is None:
            continue
        length = float(match[1])
        if length > 1:
            drafts += int(match[2]) / (length - 1)
            accepted_tokens += int(match[2])
            drafted_tokens += int(match[3])
        else:
            rejected_tokens += int(match[3])
    if not drafted_tokens:
        return 1.0 if rejected_tokens else None
    return 1 + accepted_tokens / (drafts * (1 + rejected_tokens / drafted_tokens))


def failure(what: str, log: Path) -> str:
    """A message on a job that failed: what happened, the last error that its log names, and where to read on."""
    errors = [match[1].strip() for line in lines_of(log) if (match := ERROR.search(line))]  # without Ray's prefix
    cause = f" Cause: {errors[-1]}" if errors else ""
    rays = f" Ray's logs are in {ray_logs_of(log)}." if ray_logs_of(log).is_dir() else ""
    last = last_lines(log) or "    none: does the command send its output to another file?"
    return f"{what}{cause}{rays}\nThe last lines of {log}:\n{last}"
