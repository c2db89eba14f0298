"""The demo's warmed-up drafter: made once by `verl-tlt warmup`, with progress, and kept for the next call."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from demo.follow import Tail
from demo.machine import DemoError
from demo.screen import Screen
from tests.toy.assets import Assets, hash_sources
from tests.toy.head import other_prompts, warmup_command
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.compare.job import failure
from verl_tlt.commands.processes import running

PROMPTS, STEPS = 192, 400
"""Of the warm-up: one response each, and optimizer steps. A slower machine takes longer, for the same drafter."""
POLL_S = 0.5


def warm_up(assets: Assets, screen: Screen) -> Path:
    """The drafter for this policy, made unless it is there; a call after one that was cut off goes on with its work.

    It is kept beside the policy, and has seen none of the prompts of the run to come.

    Raises:
        DemoError: the command failed; the message holds the cause and the last lines.
    """
    until = ("--max-steps", str(STEPS))
    recipe = f"{hash_sources()} {PROMPTS} {warmup_command('', '', '', *until)}"
    home = assets.policy.with_name(f"head-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}")
    drafter, prompts, log = home / "drafter", home / "prompts.parquet", home / "warmup.log"
    if not drafter.exists():
        home.mkdir(exist_ok=True)
        other_prompts(prompts, PROMPTS)
        screen.line(f"Warming up a drafter, once: {PROMPTS} responses of the policy, {STEPS} steps of training.")
        _run(warmup_command(str(assets.policy), str(prompts), str(drafter), *until), log, screen)
    length = json.loads((drafter / "provenance.json").read_text())["tau_sim"]
    screen.line(f"Warmed-up drafter: accept length {length:.2f} on held-out prompts; kept in {drafter}")
    return drafter


def _run(command: list[str], log: Path, screen: Screen) -> None:
    started, said, lines = time.time(), "starting", Tail(log)
    argv = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    with running(argv, env={**os.environ, **CPU_ENGINE}, log=log) as tree:
        while (code := tree.process.poll()) is None:
            said = next((line for line in reversed(lines.poll()) if line.startswith(("generate:", "train:"))), said)
            screen.status(f"warm-up, {time.time() - started:.0f} s: {said}")
            tree.alive()
            time.sleep(POLL_S)
    if code:
        raise DemoError(failure(f"The warm-up failed with exit status {code}.", log))
    screen.line(f"Warm-up: done in {time.time() - started:.0f} s")
