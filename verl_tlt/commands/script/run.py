"""`--run-script`: a script that cannot be read is run by bash, with a stand-in for every program that it names.

The stand-ins are functions of the shell, which print nothing. Whatever else bash tries, the kernel (seccomp) starts no
program for it, sends no signal, opens no socket and raises no limit. What the script redirects into files is written.
"""

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.script.reader import contents, only_start, read_script, recipe_of
from verl_tlt.commands.script.syntax import MAIN, Start, parse, spans_of, start_of, walk
from verl_tlt.config import TLTConfigError
from verl_tlt.errors import printable
from verl_tlt.upstream.versions import look_first_in

SECONDS = 60.0
"""Longest time that a script may take."""
LARGEST = 20_000_000
"""Most bytes of a file that the script writes, its standard error included."""
_REFUSED = {
    "x86_64": (59, 62, 200, 234, 41, 160, 302),
    "aarch64": (221, 129, 130, 131, 198, 164, 261),
}
"""Numbers of execve, kill, tkill, tgkill, socket, setrlimit and prlimit64. Bash itself is started by execveat."""
_OWN = re.compile(
    r"\.|:|\[|alias|bg|break|builtin|caller|cd|command|compgen|continue|declare|dirs|disown|echo|eval|exec|exit|export|"
    r"false|fg|getopts|hash|help|history|jobs|let|local|mapfile|popd|printf|pushd|pwd|read|readarray|readonly|return|"
    r"set|shift|shopt|source|test|times|true|type|typeset|umask|unalias|unset|wait"
)
"""Commands of the shell that touch nothing but the shell."""
_ALWAYS = ("enable", "kill", "python", "python3", "suspend", "torchrun")
_PRELUDE = """\
__called() {
  builtin read -rN1 -u $TLT_LOCK __turn
  printf '%s\\0' "$@" >&$TLT_RECORD
  case "$*" in *"$TLT_MAIN"*)
    printf '\\n\\0' >&$TLT_RECORD; pwd >&$TLT_RECORD; printf '\\0' >&$TLT_RECORD
    for __name in $(compgen -e); do printf '%s=%s\\0' "$__name" "${!__name}" >&$TLT_RECORD; done ;;
  esac
  printf '\\n\\n\\0' >&$TLT_RECORD
  printf . >&$TLT_UNLOCK
  case "$1 $2  $TLT_MISSING " in *python*" -c "*" $3 "*) return 1 ;; esac
}
command_not_found_handle() { __called "$@"; }
exec() { if [ $# -gt 0 ]; then "$@"; exit; fi; }
__is_here() {
  PATH=$PATH:$TLT_PATH type -P "$2" || [[ $(type -t "$2") =~ [bfk] && $(declare -f "$2") != *__called* ]]
}
command() { case "$1" in -v|-V) __is_here "$@" ;; -p) shift; "$@" ;; *) "$@" ;; esac; }
"""


def read_arguments(arguments: Sequence[str], config_name: str, run: bool = False) -> Recipe:
    """The recipe that a command is given: overrides, or a script and what is given to that.

    `run`: the script is run. From here on this process looks up verl where the recipe's would.
    """
    first = arguments[0] if arguments else ""
    if os.path.exists(first) or (first.endswith(".sh") and "=" not in first):
        recipe = (run_script if run else read_script)(first, arguments[1:])
    else:
        recipe = Recipe(tuple(arguments), config_name)
    folders = recipe.environment.get("PYTHONPATH", "").split(os.pathsep)
    look_first_in([recipe.directory or os.getcwd(), *folders])
    return recipe


def run_script(script: str, arguments: Sequence[str] = ()) -> Recipe:
    """How a script starts `main_ppo`, learnt by running it; raises a `TLTConfigError` where it does not."""
    text = contents(script)
    names = _programs(text, script)
    stand_ins = f"with stand-ins that print nothing for {', '.join(sorted(names)) or 'no program'}"
    notice = f"{script} is run by bash now, {stand_ins}; what it redirects into files is written."
    print(printable(notice), file=sys.stderr, flush=True)
    imports = {name for name in re.findall(r"import\s+([A-Za-z]\w*)", text) if importlib.util.find_spec(name) is None}
    ends = os.pipe()  # holds one byte: processes of a pipeline record one after the other
    with (
        tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as prelude, tempfile.TemporaryFile() as errors,
        open(ends[0], "rb") as lock, open(ends[1], "wb", buffering=0) as unlock,
    ):  # fmt: skip
        unlock.write(b".")
        stubs = "".join(f'function {name} {{ __called {name} "$@"; }}\n' for name in {*names, *_ALWAYS})
        prelude.write((_PRELUDE + stubs).encode())
        prelude.flush()
        own = {
            "PATH": "/nonexistent", "BASH_ENV": f"/dev/fd/{prelude.fileno()}", "TLT_RECORD": str(record.fileno()),
            "TLT_PATH": os.environ.get("PATH", os.defpath), "TLT_MAIN": MAIN,
            "TLT_MISSING": " ".join(f"import {name}" for name in imports), "TLT_LOCK": str(lock.fileno()),
            "TLT_UNLOCK": str(unlock.fileno()), "__name": "", "__turn": "",
        }  # fmt: skip
        _run([script, *arguments], {**os.environ, **own}, errors, (record, prelude, lock, unlock))
        record.seek(0)
        starts, others = _recorded(record.read().decode(errors="surrogateescape"), own)
        errors.seek(max(0, os.fstat(errors.fileno()).st_size - 200))
        last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    start = only_start(script, starts, others, last if not others else "")
    return recipe_of(script, arguments, start, None)


def _programs(text: str, script: str) -> set[str]:
    """Names of all programs in a script; a `TLTConfigError` where one is not written out."""
    names = set()
    for node in (node for node in walk(parse(text, script)) if node.type == "command"):
        name = next((text for first, text in spans_of(node) if first.type != "variable_assignment"), "")
        name = re.sub("['\"]", "", name)
        if not re.fullmatch(r"\[|[\w.:/+@%-]*", name):
            where = f"{script}, line {node.start_point.row + 1},"
            raise TLTConfigError(f"{where} names a program by what is only known when it runs, so it is not run.")
        if name and not _OWN.fullmatch(name):
            names.add(name)
    return names


def _run(words: Sequence[str], environment: dict[str, str], errors: IO[bytes], files: Sequence[IO[bytes]]) -> None:
    """Run bash until all its processes have ended; `errors` is its standard error."""
    bash, refused = shutil.which("bash", path=os.defpath), _REFUSED.get(platform.machine())
    if bash is None or refused is None or sys.platform != "linux":
        raise TLTConfigError("--run-script needs bash on Linux, on x86_64 or aarch64: give the overrides instead.")
    program, prctl = os.open(bash, os.O_RDONLY), ctypes.CDLL(None, use_errno=True).prctl
    # A program of classic BPF: load the call's number, compare it with each, and answer EPERM or let it through.
    checks = [(0x15, len(refused) - i, 0, number) for i, number in enumerate(refused)]
    lines = [(0x20, 0, 0, 0), *checks, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))

    def start() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        if prctl(38, 1, 0, 0, 0) or prctl(22, 2, filter_, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
            raise OSError(ctypes.get_errno(), "seccomp")
        os.execve(program, [bash, *words], environment)

    read, write = os.pipe()  # every process of the script holds the other end
    try:
        running = subprocess.Popen(
            [bash], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, preexec_fn=start,
            pass_fds=[write, *(file.fileno() for file in files)], process_group=0,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        os.close(read)
        why = f"a process ({error})" if isinstance(error, OSError) else "seccomp"
        raise TLTConfigError(f"--run-script needs {why}, which this machine refuses: give the overrides.") from error
    finally:
        os.close(program)
        os.close(write)
    try:
        ended, _, _ = select.select([read], [], [], SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        os.close(read)
    if not ended:
        raise TLTConfigError(f"{words[0]} did not end within {SECONDS:.0f} s.")


def _recorded(record: str, own: dict[str, str]) -> tuple[list[Start], list[str]]:
    """The calls in `record`: starts of `main_ppo`, and other Python programs."""
    starts: list[Start] = []
    others: list[str] = []
    for call in record.split("\n\n\0")[:-1]:
        words, _, rest = call.partition("\n\0")
        called = words.split("\0")[:-1]
        directory, *pairs = rest.split("\0")[:-1] or [""]
        environment = {n: v for n, _, v in (pair.partition("=") for pair in pairs) if n not in own}
        if rest and (start := start_of(called, environment, directory.rstrip("\n"), len(starts) + 1)):
            starts.append(start)
        elif re.match(r"(.*/)?(python[\d.]*|torchrun)$", called[0] if called else ""):
            others.append(" ".join(called[:3]))
    return starts, others
