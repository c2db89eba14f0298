"""`--run-script`: a script that cannot be read is run by bash, with a stand-in for every program that it names.

The stand-ins are functions of the shell, so no program is started: neither by its name nor by a path, whatever `PATH`
says. What the script redirects into files is written, and what programs would print is empty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.script.reader import arrived, contents, only_start, recipe_of
from verl_tlt.commands.script.shell.flow import Start
from verl_tlt.commands.script.shell.syntax import MAIN, parse, plain_name, walk, words_of_start
from verl_tlt.config import TLTConfigError
from verl_tlt.errors import printable

KEPT = 2_000
"""Characters that are kept of what a script prints; the rest is dropped as it comes."""
SECONDS = 60.0
"""Longest time that a script may take."""
_REFUSED = ("eval", "source", ".", "builtin", "enable", "coproc")
"""The shell's own commands by which a script can name programs that are not seen in it."""
_OWN = [
    "alias",
    "bg",
    "bind",
    "break",
    "caller",
    "cd",
    "compgen",
    "complete",
    "compopt",
    "continue",
    "declare",
    "dirs",
    "disown",
    "echo",
    "exit",
    "export",
    "false",
    "fc",
    "fg",
    "getopts",
    "hash",
    "help",
    "history",
    "jobs",
    "let",
    "local",
    "logout",
    "mapfile",
    "popd",
    "printf",
    "pushd",
    "pwd",
    "read",
    "readarray",
    "readonly",
    "return",
    "set",
    "shift",
    "shopt",
    "suspend",
    "test",
    "times",
    "true",
    "type",
    "typeset",
    "umask",
    "unalias",
    "unset",
    "wait",
    "[",
    "[[",
    ":",
]
_PRELUDE = """\
__called() {
  printf '%s\\0' "$@" >&$TLT_RECORD
  case "$*" in *"$TLT_MAIN"*)
    printf '\\n\\0' >&$TLT_RECORD; pwd >&$TLT_RECORD; printf '\\0' >&$TLT_RECORD
    for __name in $(compgen -e); do printf '%s=%s\\0' "$__name" "${!__name}" >&$TLT_RECORD; done ;;
  esac
  printf '\\n\\n\\0' >&$TLT_RECORD
  case "$1 $2  $TLT_MISSING " in *python*" -c "*" $3 "*) return 1 ;; esac
}
command_not_found_handle() { __called "$@"; }
exec() { if [ $# -gt 0 ]; then "$@"; exit; fi; }
command() { case "$1" in -v|-V) builtin command "$@" ;; -p) shift; "$@" ;; *) "$@" ;; esac; }
"""


def run_script(script: str, arguments: Sequence[str] = ()) -> Recipe:
    """How a script starts `main_ppo`, found out by running it; raises a `TLTConfigError` where it does not."""
    text = contents(script)
    names = _programs(text, script)
    missing = [f"import {name}" for name in set(re.findall(r"import\s+([A-Za-z_]\w*)", text)) if not _importable(name)]
    told = (
        f"{script} is run by bash now, with stand-ins for {', '.join(sorted(names)) or 'no program'}; what it redirects"
    )
    print(printable(f"{told} into files is written."), file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as prelude:
        stubs = "".join(f'function {name} {{ __called {name} "$@"; }}\n' for name in sorted(names))
        prelude.write((_PRELUDE + stubs).encode())
        prelude.flush()
        own = {
            "PATH": "/nonexistent", "BASH_ENV": f"/dev/fd/{prelude.fileno()}", "TLT_RECORD": str(record.fileno()),
            "TLT_MAIN": MAIN, "TLT_MISSING": " ".join(missing),
        }  # fmt: skip
        said = _run([script, *arguments], {**os.environ, **own}, (record, prelude))
        record.seek(0)
        starts, others = _recorded(record.read(50_000_000).decode(errors="surrogateescape"), own)
    start = only_start(script, starts, others, said if not others else "")
    arrived(
        script, [a for a in arguments if a not in start.words and re.match(r"[+~]|[\w.@/]+=", a)], start.words, set()
    )
    return recipe_of(start.words, start.environment, (), start.directory)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _programs(text: str, script: str) -> set[str]:
    """Names of all programs in a script; a `TLTConfigError` where one is not written out."""
    names = set()
    for node in (node for node in walk(parse(text, script)) if node.type == "command"):
        where = f"{script}, line {node.start_point.row + 1},"
        name = plain_name(node)
        if name is None:
            raise TLTConfigError(f"{where} names a program by what is only known when it runs, so it is not run.")
        if name in _REFUSED:
            raise TLTConfigError(f"{where} has `{name}`, which may start what has no stand-in, so it is not run.")
        names.add(name)
    functions = {match[1] for match in re.finditer(r"(?m)^\s*(?:function\s+)?([\w.-]+)\s*\(\)", text)}
    return {name for name in names - functions - set(_OWN) if name and name not in ("exec", "command")}


def _run(words: Sequence[str], environment: dict[str, str], files: Sequence[IO[bytes]]) -> str:
    """Run bash until all its processes have ended; the last line that it printed as an error."""
    bash = next(path for path in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash") if os.path.exists(path))
    read, write = os.pipe()  # every process of the script holds the other end, also one that redirects what it prints
    running = subprocess.Popen(
        [bash, *words], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write,
        pass_fds=[write, *(file.fileno() for file in files)], process_group=0,
    )  # fmt: skip
    os.close(write)
    end, kept, piece = time.monotonic() + SECONDS, b"", b"..."
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(read, selectors.EVENT_READ)
            while piece and (left := end - time.monotonic()) > 0:
                if selector.select(left):
                    piece = os.read(read, 65536)
                    kept = (kept + piece)[-KEPT:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        os.close(read)
    if piece:
        raise TLTConfigError(f"{words[0]} did not end within {SECONDS:.0f} s.")
    return (kept.decode(errors="replace").strip().splitlines() or [""])[-1]


def _recorded(record: str, own: dict[str, str]) -> tuple[list[Start], list[str]]:
    """What was called: starts of `main_ppo`, and other Python programs."""
    starts: list[Start] = []
    others: list[str] = []
    for call in record.split("\n\n\0")[:-1]:
        words, _, rest = call.partition("\n\0")
        called = words.split("\0")[:-1]
        if (given := words_of_start(called)) is not None and rest:
            directory, *pairs = rest.split("\0")[:-1]
            environment = {n: v for n, _, v in (pair.partition("=") for pair in pairs) if n not in own}
            starts.append(Start(given, environment, directory.rstrip("\n"), len(starts) + 1))
        elif re.match(r"(.*/)?(python[\d.]*|torchrun)$", called[0] if called else ""):
            others.append(" ".join(called[:3]))
    return starts, others
