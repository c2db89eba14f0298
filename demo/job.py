"""One command of the demo as a child process, of which nothing is left on any way out."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from verl_tlt.commands.compare.job import failure
from verl_tlt.commands.console import say
from verl_tlt.commands.processes import running
from verl_tlt.errors import TLTError

LOOK_S = 1.0
STALL_S = 900.0
"""Seconds without a line of output after which a command counts as hung."""


class DemoError(TLTError):
    """The demo cannot go on; the message is what the user needs to read."""


def run(
    console: Console,
    what: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    look: Callable[[], None] = lambda: None,
    stall_s: float = STALL_S,
) -> None:
    """Run a command to its end, its output in `log`; `look` is called every second.

    A DemoError says that it failed, or wrote nothing for `stall_s` seconds, with the cause and the last lines.
    """
    began = changed = time.monotonic()
    size = 0
    with running(command, env=environment, log=log) as tree, console.status(what) as status:
        while (code := tree.process.poll()) is None:
            tree.alive()
            if log.stat().st_size != size:
                size, changed = log.stat().st_size, time.monotonic()
            if time.monotonic() - changed > stall_s:
                raise DemoError(failure(f"{what}: it has written nothing for {stall_s:.0f} s.", log))
            look()
            status.update(f"{what}: {time.monotonic() - began:.0f} s")
            time.sleep(LOOK_S)
    look()
    if code:
        raise DemoError(failure(f"{what}: it failed with exit status {code}.", log))
    say(console, f"{what}: done in {time.monotonic() - began:.0f} s")
