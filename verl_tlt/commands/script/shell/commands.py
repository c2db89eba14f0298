"""The commands of a script: the shell's own change what `Shell` knows; programs are answered or passed over."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_tlt.commands.script.shell.flow import Jump, Shell, Start
from verl_tlt.commands.script.shell.syntax import LONGEST, parse, shorten, words_of_start
from verl_tlt.commands.script.shell.words import MARK, Unreadable

SHELLS = ("bash", "sh", "dash", "zsh")
DEEPEST = 30
"""Functions and files within each other."""
_PROGRAM = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_IMPORT = re.compile(r"\s*import\s+([A-Za-z_]\w*)\s*;?\s*")
_NOTHING = (
    "true",
    ":",
    "trap",
    "wait",
    "ulimit",
    "umask",
    "shopt",
    "sleep",
    "kill",
    "jobs",
    "disown",
    "bg",
    "fg",
    "hash",
)
"""Commands that change nothing in what the script goes on with, and succeed."""
_PATHS: dict[str, Callable[..., str]] = {
    "dirname": lambda here, path: re.sub(r"(?<=.)/+$", "", os.path.dirname(path.rstrip("/") or "/")) or ".",
    "basename": lambda here, path, end="": os.path.basename(path.rstrip("/")).removesuffix(end),
    "realpath": lambda here, path: os.path.realpath(os.path.join(here, path)),
    "readlink": lambda here, path: os.path.realpath(os.path.join(here, path)),
}
"""Programs that print a path made of their arguments, given the working directory."""


class Reader(Shell):
    """A `Shell` with its commands."""

    def call(self, words: Sequence[str]) -> int | None:
        """Carry out a simple command, already expanded; its status, None where that is not known."""
        if not words:
            return 0
        name, rest = words[0], list(words[1:])
        if name in self.functions:
            return self._function(name, rest)
        if name in _NOTHING or name == "false":
            return int(name == "false")
        own = getattr(self, f"_run_{name}" if name != "." else "_run_source", None)
        return own(rest) if own is not None else self._program_called(list(words))

    # ------------------------------------------------------------------ programs

    def _program_called(self, words: list[str]) -> int | None:
        name = os.path.basename(words[0])
        if (given := words_of_start(words)) is not None:
            self._start(words, given)
            return 0
        if name in SHELLS or words[0].endswith(".sh"):
            return self._shell_called(words)
        python = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(os.path.basename(word))), None)
        if python is not None:
            code = words[python + 2] if words[python + 1 : python + 2] == ["-c"] and len(words) > python + 2 else ""
            if module := _IMPORT.fullmatch(code):
                return int(importlib.util.find_spec(module[1]) is None)
            if not code and len(words) > python + 1:
                self.others.append(" ".join(words[python : python + 3]))
        return self._answered(name, words[1:])

    def _start(self, words: Sequence[str], given: tuple[str, ...]) -> None:
        """Note that `main_ppo` is started."""
        pairs = [word.partition("=") for word in words[1:] if re.match(r"[A-Za-z_]\w*=", word)]
        own = {key: value for key, _, value in pairs} if os.path.basename(words[0]) == "env" else {}
        values = {name: self.variables.get(name) for name in self.exported}
        environment = {name: value for name, value in values.items() if isinstance(value, str)} | own
        self.starts.append(Start(given, environment, self.directory, self.line))

    def _answered(self, name: str, arguments: list[str]) -> int | None:
        """What a program prints, where that is plain; it is not run."""
        plain = [word for word in arguments if not word.startswith("-")]
        if name == "mkdir":
            paths = [Path(os.path.normpath(os.path.join(self.directory, word))) for word in plain]
            self.made.update(str(place) for path in paths for place in (path, *path.parents))
            return 0
        if name in ("which", "type"):
            return self._found(plain)
        if self.printed is None:
            return None
        most = 2 if name == "basename" else 1
        if name in _PATHS and 0 < len(plain) <= most and (name != "readlink" or "-f" in arguments):
            self.printed.append(_PATHS[name](self.known(self.directory), *map(self.known, plain)) + "\n")
            return 0
        self.printed.append(None)
        return None

    def _found(self, names: Sequence[str]) -> int | None:
        """Whether there are commands of these names; prints where."""
        path = self.variables.get("PATH")
        status = 0
        for name in map(self.known, names):
            place = shutil.which(name, path=self.known(path) if isinstance(path, str) else None)
            own = name in self.functions or hasattr(self, f"_run_{name}") or name in _NOTHING
            status |= int(place is None and not own)
            if self.printed is not None and (place or own):
                self.printed.append(f"{name if own else place}\n")
        return status

    def _shell_called(self, words: list[str]) -> int | None:
        """`bash SCRIPT ARGUMENTS` or `bash -c TEXT`: read in a shell of its own, which knows what is exported."""
        rest = words[1:] if os.path.basename(words[0]) in SHELLS else words
        flags = [word for word in rest if re.fullmatch(r"-\w+", word)]
        while rest and re.fullmatch(r"-\w+", rest[0]):
            rest.pop(0)
        if not rest:
            return None
        inner = self.inner()
        inner.variables = {k: v for k, v in self.variables.items() if k in self.exported or k in ("HOSTNAME", "UID")}
        inner.functions, inner.ends_on_failure, inner.strict, inner.depth = {}, False, False, self.depth + 1
        if any("c" in flag for flag in flags):
            text, inner.arguments = self.known(rest[0]), rest[2:]
        else:
            path = Path(self.known(self.directory), self.known(rest[0]))
            if not path.is_file():
                return None
            text, inner.script, inner.arguments = _contents(path), str(path), rest[1:]
            inner.variables["BASH_SOURCE"] = [str(path)]
        self.looked_at.update(inner.arguments)
        return self._within(inner, text)

    def _within(self, shell: Shell, text: str) -> int | None:
        if shell.depth > DEEPEST:
            raise Unreadable(f"files within each other, {DEEPEST} deep")
        try:
            return shell.sequence(parse(text, shell.script).children)
        except Jump as jump:
            return jump.status

    # ------------------------------------------------------------------ the shell's own commands

    def _function(self, name: str, arguments: list[str]) -> int | None:
        kept, self.arguments, self.depth = self.arguments, arguments, self.depth + 1
        if self.depth > DEEPEST:
            raise Unreadable(f"the function {name}, which calls itself")
        try:
            return self.run(self.functions[name])
        except Jump as jump:
            if jump.kind != "return":
                raise
            return jump.status
        finally:
            self.arguments, self.depth = kept, self.depth - 1

    def _run_echo(self, words: list[str]) -> int:
        if self.printed is not None:
            flags = [word for word in words[:1] if re.fullmatch(r"-[neE]+", word)]
            self.printed.append(" ".join(words[len(flags) :]) + ("" if any("n" in f for f in flags) else "\n"))
        return 0

    def _run_printf(self, words: list[str]) -> int:
        if words[:1] == ["-v"]:
            self.put(words[1], None, self._formatted(words[2:]))
        elif self.printed is not None:
            self.printed.append(self._formatted(words))
        return 0

    def _formatted(self, words: list[str]) -> str:
        layout, values = words[0] if words else "", words[1:]
        signs = re.findall(r"%0?\d*[sd]", layout)
        if len(signs) != len(values) or layout.replace("%%", "").count("%") != len(signs):
            return self.mark(f"`printf {shorten(layout)}` (line {self.line})")
        layout = layout.replace("\\n", "\n").replace("\\t", "\t")
        given = [int(self.known(v)) if sign.endswith("d") else v for sign, v in zip(signs, values, strict=True)]
        return layout % tuple(given)

    def _run_pwd(self, _words: list[str]) -> int:
        if self.printed is not None:
            self.printed.append(f"{self.directory}\n")
        return 0

    def _run_cd(self, words: list[str]) -> int:
        places = [word for word in words if word not in ("--", "-P", "-L")]
        before = self.variables.get("OLDPWD", self.directory)
        home = str(self.variables.get("HOME", "/"))
        place = (before if places[0] == "-" else places[0]) if places else home
        if MARK.search(str(place)) or MARK.search(self.directory):
            self.variables["OLDPWD"], self.directory = self.directory, str(place)
            return 0
        path = os.path.normpath(os.path.join(self.directory, str(place)))
        if not os.path.isdir(path) and path not in self.made:
            return 1
        self.variables["OLDPWD"], self.directory = self.directory, path
        return 0

    _run_pushd = _run_cd

    def _run_popd(self, _words: list[str]) -> int:
        return self._run_cd(["-"])

    def _run_exec(self, words: list[str]) -> int:
        if words:
            raise Jump("exit", self.call(words))
        return 0

    def _run_command(self, words: list[str]) -> int | None:
        if words[:1] in (["-v"], ["-V"]):
            return self._found(words[1:])
        return self.call([word for i, word in enumerate(words) if i or word != "-p"])

    _run_builtin = _run_time = _run_command

    def _run_eval(self, words: list[str]) -> int | None:
        return self._within_here(self.known(" ".join(words)))

    def _within_here(self, text: str) -> int | None:
        return self.sequence(parse(text, self.script).children)

    def _run_source(self, words: list[str]) -> int | None:
        if not words:
            return 1
        path = Path(self.known(self.directory), self.known(words[0]))
        if not path.is_file():
            raise Unreadable(f"{path} (line {self.line}), which is not here")
        kept, names = self.arguments, self.variables.get("BASH_SOURCE")
        self.arguments, self.depth = words[1:] or kept, self.depth + 1
        self.variables["BASH_SOURCE"] = [str(path)]
        if self.depth > DEEPEST:
            raise Unreadable(f"files within each other, {DEEPEST} deep")
        try:
            return self._within_here(_contents(path))
        except Jump as jump:
            if jump.kind != "return":
                raise
            return jump.status
        finally:
            self.arguments, self.depth = kept, self.depth - 1
            self.variables["BASH_SOURCE"] = names or []

    def _run_exit(self, words: list[str]) -> int:
        raise Jump("exit", int(words[0]) if words and words[0].isdigit() else 0)

    def _run_return(self, words: list[str]) -> int:
        raise Jump("return", int(words[0]) if words and words[0].isdigit() else 0)

    def _run_break(self, _words: list[str]) -> int:
        raise Jump("break")

    def _run_continue(self, _words: list[str]) -> int:
        raise Jump("continue")

    def _run_shift(self, words: list[str]) -> int:
        count = self.arithmetic(words[0]) if words else 1
        if count > len(self.arguments):
            return 1
        self.looked_at.update(self.arguments[:count])
        self.arguments = self.arguments[count:]
        return 0

    def _run_set(self, words: list[str]) -> int:
        while words:
            word = words.pop(0)
            if word == "--" or word[:1] not in ("-", "+"):
                self.arguments = words if word == "--" else [word, *words]
                break
            on, option = word[0] == "-", words.pop(0) if word[1:].endswith("o") and words else ""
            if "e" in word or option == "errexit":
                self.ends_on_failure = on
            if "u" in word or option == "nounset":
                self.strict = on
        return 0

    def _run_export(self, words: list[str]) -> int:
        """`export` where the parser takes it for a plain command."""
        names = [self._declare(word) for word in words if not word.startswith("-")]
        self.exported.update(names)
        return 0

    def _run_read(self, words: list[str]) -> int | None:
        """What is read from a file or a terminal is not known."""
        for word in words:
            if re.fullmatch(r"[A-Za-z_]\w*", word):
                self.variables[word] = self.mark(f"`read {word}` (line {self.line})")
        return None

    _run_mapfile = _run_readarray = _run_getopts = _run_read

    def _run_let(self, words: list[str]) -> int:
        result = 0
        for word in words:
            result = self.arithmetic(word)
        return int(result == 0)


def _contents(path: Path) -> str:
    with path.open(errors="replace") as file:
        return file.read(LONGEST + 1)
