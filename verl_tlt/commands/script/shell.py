"""Reads a shell script as bash would carry it out, and notes how it starts `main_ppo`. No line of it is run.

Assignments, tests and branches are followed; of programs only a few whose answer is known (`dirname`, `python -c
'import x'`) are answered, and the others are passed over. What else changes something, such as a loop, a function or
`source`, needs running, and so does a branch that hangs on something unknown, unless it changes nothing here.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.commands.script.syntax import (
    MAIN,
    MARK,
    Start,
    gives_up,
    parse,
    shorten,
    spans_of,
    start_of,
    text_of,
    walk,
)
from verl_tlt.commands.script.words import Stopped, Unreadable, Value, Words
from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from tree_sitter import Node

_SUCCEED = ("true", ":", "trap", "umask", "sleep")
"""Commands that change nothing in what the script goes on with, and never fail."""
_NEEDS_RUNNING = re.compile(
    r"(eval|source|\.|read|mapfile|readarray|getopts|let|pushd|popd|builtin|alias|coproc|local|unset|declare|printf -v|"
    r"command(?! -[vV]))\s"
)
_CHANGING = ("variable_assignment", "declaration_command", "unset_command", "for_statement", "arithmetic_expansion")
"""Nodes that a branch must not have where it is not known whether the branch is taken."""
_PROGRAMS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|bash|sh|zsh|.*\.sh")
"""Programs that a script may start in place of `main_ppo`."""
_IMPORT = re.compile(r"\s*import\s+([A-Za-z_]\w*)\s*;?\s*")
_FAIL = ("command", "test_command", "variable_assignment", "pipeline", "subshell")
"""Commands by whose failure `set -e` ends a script."""
_OPTIONS = {"errexit": "e", "nounset": "u", "allexport": "a"}
"""Options of `set` that are followed, by their names."""
_WITHOUT_EFFECT = [*"xvhmbBCEHTPp", "xtrace", "verbose", "pipefail", "hashall", "monitor", "noclobber", "errtrace"]


class Exit(Exception):
    """The end of a script or of a subshell; its argument is the status it leaves."""


class Shell(Words):
    """A bash that follows a script; `starts` are the starts of `main_ppo` in it. A status of None is not known."""

    def __init__(self, script: str, arguments: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        own: dict[str, Value] = {"HOSTNAME": os.uname().nodename, "UID": str(os.getuid()), "BASH_SOURCE": [script]}
        super().__init__(script, arguments, {**own, **environment}, directory)
        self.exported = set(environment)
        self.functions: set[str] = set()
        self.starts: list[Start] = []
        self.others: list[str] = []
        """First words of the other Python programs and scripts that it starts."""
        self.printed: list[str | None] | None = None
        """Texts printed within a substitution; None among them: a program printed it, so it is not known."""
        self.made: set[str] = set()
        """Directories that the script makes."""
        self.substituted: int | None = 0
        """Status of the last substitution, which is also that of an assignment around it."""
        self.assumed: dict[str, None] = {}
        """Commands that are taken to go well, which only a run could tell."""
        self.tested = False
        """Whether the status of the current command is asked for, so that `set -e` ends nothing."""

    def forked(self) -> Shell:
        """A copy of this shell, whose assignments and options stay its own."""
        other = copy.copy(self)
        other.variables, other.exported, other.arguments = {**self.variables}, {*self.exported}, [*self.arguments]
        other.options = {*self.options}
        return other

    def apart(self, nodes: Iterable[Node], printed: list[str | None] | None) -> int | None:
        """Carry out commands in a subshell."""
        shell = self.forked()
        if printed is not self.printed:  # a substitution, in which bash drops `set -e`
            shell.options.discard("e")
        shell.printed = printed
        try:
            return shell.sequence(nodes)
        except Exit as end:
            status: int | None = end.args[0]
            return status

    def substitute(self, command: str) -> str:
        """What `$(command)` prints; a mark where a program would print it."""
        reason = self.cause(f"$({command})")
        printed: list[str | None] = []
        self.substituted = 1
        try:
            with contextlib.suppress(Stopped):
                self.substituted = self.apart(parse(command, self.script).children, printed)
        except (TLTError, Unreadable):
            self.substituted = None
            return self.mark(reason)
        return "".join(self.mark(reason) if part is None else part for part in printed).rstrip("\n")

    def _print(self, text: str | None) -> int | None:
        """What a command prints, and its status: both are unknown where it is a program."""
        if self.printed is not None:
            self.printed.append(text)
        return None if text is None else 0

    # ------------------------------------------------------------------ structure

    def sequence(self, nodes: Iterable[Node], asked: bool = False) -> int | None:
        """Carry out commands and return the last one's status; where that is `asked` for, `set -e` ends nothing."""
        status: int | None = 0
        outside = self.tested
        for node in nodes:
            if node.is_named and node.type != "comment":
                self.line = node.start_point.row + 1
                behind = node.next_sibling is not None and node.next_sibling.type == "&"
                self.tested = outside or asked or behind
                status = getattr(self, f"_{node.type}", self._unknown)(node)
                status = 0 if behind else status
                ends = "e" in self.options and not self.tested and not (node.parent and node.parent.type == "pipeline")
                if status != 0 and ends and (node.type in _FAIL or text_of(node).startswith("((")):
                    where = self.cause(text_of(node))
                    if status is not None:
                        raise Stopped(f"{where} fails, and `set -e` ends it there")
                    self.assumed[where] = None
        self.tested = outside
        return status

    def _unknown(self, node: Node) -> int | None:
        return self._undecided([[node], []], self.cause(text_of(node)), loop=True)

    def _variable_assignments(self, node: Node) -> int | None:
        return self.sequence(node.children)

    def _compound_statement(self, node: Node) -> int | None:
        text = text_of(node)
        if not text.startswith("(("):
            return self.sequence(node.children)
        try:
            return int(self.arithmetic(text[2:-2]) == 0)
        except Unreadable:
            return None

    def _subshell(self, node: Node) -> int | None:
        return self.apart(node.children, self.printed)

    def _pipeline(self, node: Node) -> int | None:
        for part in node.named_children:
            self.apart([part], None)
        return self._print(None)

    def _redirected_statement(self, node: Node) -> int | None:
        body, kept = node.child_by_field_name("body"), self.printed
        if body is None:  # `$(< file)`
            return self._print(None)
        if any(re.match(r"(1|&)?>(?!&1)", text_of(child)) for child in node.children_by_field_name("redirect")):
            self.printed = None
        status = self.sequence([body])
        self.printed = kept
        return status

    def _negated_command(self, node: Node) -> int | None:
        status = self.sequence(node.named_children, asked=True)
        return None if status is None else int(not status)

    def _list(self, node: Node) -> int | None:
        left, right = node.named_children[0], node.named_children[-1]
        status = self.sequence([left], asked=True)
        if status is None:
            return self._undecided([[right], []], self.cause(text_of(left)))
        wants_success = any(child.type == "&&" for child in node.children)
        return self.sequence([right]) if (status == 0) == wants_success else status

    def _if_statement(self, node: Node) -> int | None:
        """`if` with its `elif` and `else`, the first of which whose test holds is taken."""
        branches: list[tuple[list[Node], list[Node]]] = []
        for clause in [node, *(c for c in node.named_children if c.type in ("elif_clause", "else_clause"))]:
            own = [c for c in clause.children if c.type not in ("elif_clause", "else_clause", "comment")]
            then = next((i for i, c in enumerate(own) if c.type == "then"), 0)
            branches.append(([c for c in own[:then] if c.is_named], [c for c in own[then:] if c.is_named]))
        for i, (tests, body) in enumerate(branches):
            status = self.sequence(tests, asked=True)
            if status is None:
                return self._undecided(
                    [*(body for _, body in branches[i:]), []], self.cause(" ".join(map(text_of, tests)))
                )
            if status == 0:
                return self.sequence(body)
        return 0

    def _case_statement(self, node: Node) -> int | None:
        cases = []
        for item in (c for c in node.named_children if c.type == "case_item"):
            close = next(i for i, c in enumerate(item.children) if c.type == ")")
            patterns = [text_of(c) for c in item.children[:close] if c.is_named]
            cases.append((patterns, [c for c in item.children[close + 1 :] if c.is_named]))
        try:
            text = self.known(self.value(text_of(node.named_children[0])))
            body = next((body for patterns, body in cases if any(self.matches(text, p) for p in patterns)), [])
        except Unreadable as error:
            return self._undecided([*(body for _, body in cases), []], str(error))
        return self.sequence(body)

    def _function_definition(self, node: Node) -> int | None:
        self.functions.add(text_of(node.named_children[0]))
        return 0

    def _undecided(self, bodies: Sequence[Sequence[Node]], reason: str, loop: bool = False) -> int | None:
        """Go on after branches of which it is not known, for this `reason`, which one is taken, or how often."""
        starting = [body for body in bodies if any(MAIN in text_of(node) for node in body)]
        going_on = [body for body in bodies if not gives_up(body)]
        if only := next((group for group in (starting, going_on) if len(group) == 1 and not loop), None):
            self.assumed[reason] = None
            return self.sequence(only[0])
        if starting:
            raise Unreadable(f"{reason}, which decides how it starts {MAIN}")
        for node in (inner for body in going_on for command in body for inner in walk(command)):
            text = text_of(node)
            name = text.split()[0] if node.type == "command" else ""
            changes = name in ("cd", "set", "shift", *self.functions) or (name and _NEEDS_RUNNING.match(text + " "))
            if changes or node.type in _CHANGING or text.startswith("((") or (node.type == "expansion" and "=" in text):
                inner = f"`{shorten(text)}`"
                decides = "" if inner in reason else f", which decides whether {inner} is carried out"
                raise Unreadable(reason + decides)
        return None

    # ------------------------------------------------------------------ variables

    def _variable_assignment(self, node: Node) -> int | None:
        self.substituted = 0
        self._assign(node, text_of(node))
        return self.substituted

    def _assign(self, node: Node, text: str) -> str:
        """Carry out an assignment, whose whole text may be longer than its node; returns the name."""
        match, value = re.fullmatch(r"(\w+)(\+?)=(.*)", text, re.DOTALL), node.child_by_field_name("value")
        before = self.variables.get(match[1]) if match else None
        if match is None or (isinstance(before, list) and (value is None or value.type != "array")):  # `a[1]=x`
            raise Unreadable(self.cause(text))
        if "a" in self.options:
            self.exported.add(match[1])
        before = before if match[2] else None
        if value is None or value.type != "array":
            self.variables[match[1]] = str(before or "") + self.value(match[3])
            return match[1]
        texts = [text for _, text in spans_of(value)]
        if any(text.startswith("[") and "]=" in text for text in texts):
            raise Unreadable(self.cause(text))
        old = before if isinstance(before, list) else [before] if before else []
        self.variables[match[1]] = [*old, *(field for text in texts for field in self.fields(text))]
        return match[1]

    def _declaration_command(self, node: Node) -> int | None:
        kind = node.children[0].type
        for child, text in spans_of(node)[1:]:
            name = text.partition("=")[0].rstrip("+")
            if kind == "local" or not re.fullmatch(r"\w+", name):  # `export $(cat .env)`, `declare -A x`
                raise Unreadable(self.cause(text_of(node)))
            if child.type == "variable_assignment":
                self._assign(child, text)
            if kind == "export":
                self.exported.add(name)
        return 0

    def _unset_command(self, node: Node) -> int | None:
        for child in node.named_children:
            for name in self.fields(text_of(child)):
                self.variables.pop(self.known(name), None)
        return 0

    def _test_command(self, node: Node) -> int | None:
        inner = [child for child in node.children[1:-1] if child.is_named]
        try:
            return int(not self.holds(inner[0], strings=node.children[0].type == "[")) if inner else 1
        except Unreadable:
            return None

    # ------------------------------------------------------------------ commands

    def _command(self, node: Node) -> int | None:
        """A command with the assignments before it, which hold for it alone."""
        spans = spans_of(node)
        count = next((i for i, (first, _) in enumerate(spans) if first.type != "variable_assignment"), len(spans))
        assignments, rest = spans[:count], spans[count:]
        between = (node.text or b"")[: rest[0][0].start_byte - node.start_byte] if rest else b""
        alone = not rest or re.search(rb"(?<!\\)\n\s*$", between)  # the parser joins some to the next line
        for first, text in assignments if alone else ():
            self._assign(first, text)
        words = [field for _, text in rest for field in self.fields(text)]
        if alone or not assignments:
            return self.call(words)
        shell = self.forked()
        shell.exported.update(shell._assign(first, text) for first, text in assignments)
        return shell.call(words)

    def call(self, words: Sequence[str]) -> int | None:
        """Carry out a simple command, already expanded."""
        if not words:
            return 0
        name = words[0]
        if name in self.functions or _NEEDS_RUNNING.match(" ".join(words) + " "):
            raise Unreadable(self.cause(" ".join(words)))
        environment = {n: value for n in self.exported if isinstance(value := self.variables.get(n), str)}
        if name != "exec" and (start := start_of(words, environment, self.directory, self.line)):
            self.starts.append(replace(start, assumed=(*self.assumed, *start.assumed)))
            return 0
        if name in _SUCCEED or name == "false":
            return int(name == "false")
        own = getattr(self, f"_run_{name}", None)
        status: int | None = own(list(words[1:])) if own is not None else self._program_called(words)
        return status

    def _program_called(self, words: Sequence[str]) -> int | None:
        """A program: the few that print what is known are answered."""
        names = [os.path.basename(word) for word in words]
        at = next((i for i, name in enumerate(names) if _PROGRAMS.fullmatch(name)), None)
        if at is not None and words[at + 1 : at + 2] == ["-c"] and names[at].startswith("python"):
            if module := _IMPORT.fullmatch("".join(words[at + 2 : at + 3])):
                return int(importlib.util.find_spec(module[1]) is None)
        elif at is not None:
            self.others.append(shorten(" ".join(words[at : at + 3])))
        plain = [word for word in words[1:] if not word.startswith("-")]
        if names[0] in ("dirname", "realpath") and len(plain) == 1:
            path = self.known(plain[0])
            whole = os.path.realpath(os.path.join(self.known(self.directory), path))
            text = whole if names[0] == "realpath" else os.path.dirname(path.rstrip("/") or "/") or "."
            return self._print(f"{text}\n")
        return self._print(None)

    # ------------------------------------------------------------------ the shell's own commands

    def _run_echo(self, words: list[str]) -> int | None:
        plain = not re.fullmatch(r"-[neE]+", "".join(words[:1]))
        self._print(" ".join(words) + "\n" if plain else None)
        return 0

    def _run_printf(self, _words: list[str]) -> int | None:
        self._print(None)
        return 0

    def _run_pwd(self, _words: list[str]) -> int | None:
        return self._print(f"{self.directory}\n")

    def _run_cd(self, words: list[str]) -> int:
        places = [word for word in words if word not in ("--", "-P", "-L")]
        place = places[0] if places else str(self.variables.get("HOME", "/"))
        if not MARK.search(place + self.directory):
            place = os.path.normpath(os.path.join(self.directory, place))
            if not os.path.isdir(place) and place not in self.made:
                raise Unreadable(f"the directory {place} (line {self.line}), which is not here")
        self.directory = place
        return 0

    def _run_mkdir(self, words: list[str]) -> int:
        for path in (Path(os.path.normpath(os.path.join(self.directory, word))) for word in words):
            self.made.update(map(str, (path, *path.parents)))
        return 0

    def _run_exec(self, words: list[str]) -> int:
        if words:
            raise Exit(self.call(words))
        return 0

    def _run_exit(self, words: list[str]) -> int:
        raise Exit(int(words[0]) if words and words[0].isdecimal() else 0)

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
            names = [words.pop(0)] if "o" in word[1:] and words else []
            for option in [*word[1:].replace("o", ""), *names]:
                letter = _OPTIONS.get(option, option)
                if letter in _OPTIONS.values():
                    (self.options.add if word[0] == "-" else self.options.discard)(letter)
                elif option not in _WITHOUT_EFFECT:
                    raise Unreadable(self.cause(" ".join(["set", word, *names])))
        return 0
