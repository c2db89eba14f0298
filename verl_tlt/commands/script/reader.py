"""A recipe read from the shell script that starts `main_ppo`; nothing of the script is run.

`run_script` is for a script that cannot be read: bash carries it out with a stand-in for every program.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_tlt.checks.recipe import CONFIG, Recipe
from verl_tlt.commands.script.shell.commands import Reader
from verl_tlt.commands.script.shell.flow import Start
from verl_tlt.commands.script.shell.syntax import LONGEST, MAIN, parse
from verl_tlt.commands.script.shell.words import MARK, Stopped, Unreadable
from verl_tlt.config import TLTConfigError
from verl_tlt.errors import TLTError

NOT_RUN = "not-run"
"""Stands in a name or a path for what a program of the script would print, such as the date."""
NAMES = re.compile(
    r"trainer\.(experiment_name|project_name|logger|\w+_(local|data|hdfs)_dir)|tlt\.(trace\.dir|drafter\.save_dir)"
    r"|hydra\.(run|sweep|job|job_logging)\..*|.*profiler\..*(path|dir)|.*\.env_vars\.WANDB_\w+"
)
"""Settings that decide nothing about a run: what it is called and where it writes."""
_OWN = ("PWD", "OLDPWD", "SHLVL", "_")


def read_script(
    script: str | os.PathLike[str], arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Recipe:
    """How a shell script would start `main_ppo`, given `arguments`.

    `environment` is added to this process's. A `TLTConfigError` says what cannot be read, or that the script would not
    come to `main_ppo`.
    """
    text = contents(script)
    shell = Reader(str(script), arguments, {**os.environ, **(environment or {})}, os.getcwd())
    stopped = ""
    try:
        shell.follow(parse(text, str(script)))
    except Stopped as error:
        stopped = str(error)
    except Unreadable as error:
        if not shell.starts:
            raise TLTConfigError(f"{script} depends on {error}, and {REMEDY}") from None
    except RecursionError:
        raise TLTConfigError(f"{script} is nested too deep to be read.") from None
    except (AssertionError, LookupError, OSError, TypeError, ValueError) as error:  # no valid bash, most likely
        raise TLTConfigError(
            f"{script}, line {shell.line}, cannot be read ({type(error).__name__}: {error})."
        ) from None
    except TLTError as error:
        raise TLTConfigError(str(error)) from None
    start = only_start(str(script), shell.starts, shell.others, stopped)
    known = _known(str(script), start, shell)
    arrived(str(script), arguments, known[0], shell.looked_at)
    return recipe_of(*known, start.directory)


REMEDY = "nothing of a script is run: set it yourself, or add --run-script."


def contents(script: str | os.PathLike[str]) -> str:
    """A script's text."""
    if not os.path.isfile(script):
        raise TLTConfigError(f"{script} does not exist.")
    with Path(script).open(errors="replace") as file:
        return file.read(LONGEST + 1)


def only_start(script: str, starts: Sequence[Start], others: Sequence[str], stopped: str = "") -> Start:
    """The one way in which a script starts `main_ppo`."""
    if not starts:
        instead = f"it starts `{others[-1]}`" if others else "it ends before"
        raise TLTConfigError(f"{script} does not start `python -m {MAIN}` here: {(stopped or instead).rstrip('.')}.")
    if len({start.words for start in starts}) > 1:
        lines = " and ".join(sorted({str(start.line) for start in starts}, key=int))
        raise TLTConfigError(f"{script} starts {MAIN} {len(starts)} times, each time otherwise (line {lines}).")
    return starts[0]


def _known(script: str, start: Start, shell: Reader) -> tuple[list[str], dict[str, str], tuple[str, ...]]:
    """Words and environment of a start, with a stand-in where a name or a path is not known."""
    words = []
    for word in start.words:
        key, equals, _ = word.partition("=")
        unknown = MARK.search(word)
        if unknown and (not equals or MARK.search(key) or not NAMES.fullmatch(key.lstrip("+~"))):
            reason, what = shell.cause_of(word), MARK.sub("...", key if equals else f"`{word}`")
            raise TLTConfigError(f"{script} takes {what} from {reason}, and {REMEDY}")
        words.append(MARK.sub(NOT_RUN, word))
    if MARK.search(start.directory):
        raise TLTConfigError(f"{script} starts {MAIN} in a directory that is not known, and {REMEDY}")
    unread = tuple(sorted(name for name, value in start.environment.items() if MARK.search(value)))
    return words, {name: value for name, value in start.environment.items() if name not in unread}, unread


def arrived(script: str, arguments: Sequence[str], words: Sequence[str], looked_at: set[str]) -> None:
    """Raise a `TLTConfigError` where an argument of the script would be lost."""
    for argument in arguments:
        override = re.match(r"[+~]|[\w.@/]+=", argument) is not None
        if argument not in words and (override or argument not in looked_at):
            remedy = f'write "$@" after the other words that {MAIN} is given there'
            raise TLTConfigError(f"{script} does not hand {argument} on to {MAIN}: {remedy}.")


def recipe_of(words: Sequence[str], environment: Mapping[str, str], unread: tuple[str, ...], directory: str) -> Recipe:
    """A recipe from the words that `main_ppo` is given, Hydra's own options among them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", nargs="?", default=CONFIG, const="")
    parser.add_argument("--config-path", "-cp", nargs="?", default="", const="")
    parser.add_argument("--config-dir", "-cd", nargs="?", default="", const="")
    options, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if not word.startswith("-")]
    if options.config_dir:
        more, verls = os.path.join(directory, options.config_dir), options.config_path or "pkg://verl.trainer.config"
        primary = os.path.isfile(os.path.join(more, f"{options.config_name.removesuffix('.yaml')}.yaml"))
        overrides.append(f"hydra.searchpath=[{verls if primary else f'file://{more}'}]")
        options.config_path = more if primary else options.config_path
    changed = {k: v for k, v in environment.items() if os.environ.get(k) != v and k not in _OWN}
    config = os.path.join(options.config_path, options.config_name)
    return Recipe(tuple(overrides), config, changed, directory, unread)
