"""A recipe read from the shell script that starts `main_ppo`; nothing of the script is run.

`run_script` is for a script that cannot be read: bash carries it out with a stand-in for every program.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from verl_tlt.checks.recipe import CONFIG, Recipe
from verl_tlt.commands.script.shell import Exit, Shell
from verl_tlt.commands.script.syntax import LONGEST, MAIN, MARK, Start, parse
from verl_tlt.commands.script.words import Stopped, Unreadable
from verl_tlt.config import TLTConfigError

NOT_RUN = "not-run"
"""Stand-in, in a name or a path, for what a program of the script would print, such as the date."""
REMEDY = "nothing of a script is run: set it yourself, or add --run-script."
NAMES = re.compile(
    r"trainer\.(experiment_name|project_name|logger|\w+_(local|data|hdfs)_dir)|tlt\.(trace\.dir|drafter\.save_dir)"
    r"|hydra\.(run|sweep|job|job_logging)\..*|.*profiler\..*(path|dir)|.*\.env_vars\.WANDB_\w+"
)
"""Settings that decide nothing about a run: what it is called and where it writes."""


def read_script(
    script: str | os.PathLike[str], arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Recipe:
    """How a shell script would start `main_ppo`, given `arguments`.

    `environment` is added to this process's. A `TLTConfigError` says what cannot be read, or that the script would not
    come to `main_ppo`.
    """
    text = contents(script)
    shell = Shell(str(script), arguments, {**os.environ, **(environment or {})}, os.getcwd())
    stopped = ""
    try:
        with contextlib.suppress(Exit):
            shell.options.update(*re.findall(r"\A#!.*?[ \t]-([a-z]+)\s*$", text, re.MULTILINE))
            shell.sequence(parse(text, str(script)).children)
    except Stopped as error:
        stopped = str(error)
    except Unreadable as error:
        if not shell.starts:
            raise TLTConfigError(f"{script} depends on {error}, and {REMEDY}") from None
    except TLTConfigError:
        raise
    except (LookupError, OSError, RecursionError, TypeError, ValueError) as error:  # no valid bash, most likely
        cause = f"({type(error).__name__}: {error})"
        raise TLTConfigError(f"{script}, line {shell.line}, cannot be read {cause}.") from None
    start = only_start(str(script), shell.starts, shell.others, stopped)
    for word in start.words:
        key, equals, _ = word.partition("=")
        if MARK.search(word) and (not equals or MARK.search(key) or not NAMES.fullmatch(key.lstrip("+~"))):
            what = MARK.sub("...", key if equals else f"`{word}`")
            raise TLTConfigError(f"{script} takes {what} from {shell.cause_of(word)}, and {REMEDY}")
    if MARK.search(start.directory):
        raise TLTConfigError(f"{script} starts {MAIN} in a directory that is not known, and {REMEDY}")
    start = replace(start, words=tuple(MARK.sub(NOT_RUN, word) for word in start.words))
    return recipe_of(str(script), arguments, start, shell.looked_at)


def contents(script: str | os.PathLike[str]) -> str:
    """A script's text; a `TLTConfigError` where it has none that bash reads."""
    if not os.path.isfile(script):
        raise TLTConfigError(f"{script} {'is no script' if os.path.exists(script) else 'does not exist'}.")
    with Path(script).open(errors="replace", newline="") as file:
        text = file.read(LONGEST + 1)
    if "\r\n" in text:
        wrong = "has Windows line ends, which bash takes for parts of words: run dos2unix on it."
        raise TLTConfigError(f"{script} {wrong}")
    return text


def only_start(script: str, starts: Sequence[Start], others: Sequence[str], stopped: str) -> Start:
    """The only way in which a script starts `main_ppo`; `stopped` says why the script ended early."""
    if not starts:
        instead = f"it starts `{others[-1]}`" if others else "it ends before"
        raise TLTConfigError(f"{script} does not start `python -m {MAIN}` here: {(stopped or instead).rstrip('.')}.")
    if hidden := next((start for start in starts if start.through), None):
        other = f"through `{hidden.through}` (line {hidden.line}), which may give it other words or variables"
        raise TLTConfigError(f"{script} starts {MAIN} {other}: give its overrides in place of the script.")
    if len({start.words for start in starts}) > 1:
        lines = " and ".join(sorted({str(start.line) for start in starts}, key=int))
        raise TLTConfigError(f"{script} starts {MAIN} {len(starts)} times, each time otherwise (line {lines}).")
    return starts[0]


def recipe_of(script: str, arguments: Sequence[str], start: Start, looked_at: set[str] | None) -> Recipe:
    """The recipe of a start by words, Hydra's own options among them.

    A `TLTConfigError` says that an argument of the script would be lost: one that is an override, or that the script
    has not looked at (None: that is not known).
    """
    for argument in (argument for argument in arguments if argument not in start.words):
        if (looked_at is not None and argument not in looked_at) or re.match(r"[+~]|[\w.@/]+=", argument):
            remedy = f'write "$@" after the other words that {MAIN} is given there'
            raise TLTConfigError(f"{script} does not hand {argument} on to {MAIN}: {remedy}.")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", nargs="?", default=CONFIG, const="")
    parser.add_argument("--config-path", "-cp", nargs="?", default="", const="")
    parser.add_argument("--config-dir", "-cd", nargs="?", default="", const="")
    options, rest = parser.parse_known_args(start.words)
    overrides = [word for word in rest if not word.startswith("-")]
    if options.config_dir:
        folder = os.path.join(start.directory, options.config_dir)
        searched = options.config_path or "pkg://verl.trainer.config"
        primary = os.path.isfile(os.path.join(folder, f"{options.config_name.removesuffix('.yaml')}.yaml"))
        overrides.append(f"hydra.searchpath=[{searched if primary else f'file://{folder}'}]")
        options.config_path = folder if primary else options.config_path
    unread = tuple(sorted(name for name, value in start.environment.items() if MARK.search(value)))
    own = ("PWD", "OLDPWD", "SHLVL", "_", *unread)
    changed = {k: v for k, v in start.environment.items() if os.environ.get(k) != v and k not in own}
    config = os.path.join(options.config_path, options.config_name)
    return Recipe(tuple(overrides), config, changed, start.directory, unread, start.assumed)
