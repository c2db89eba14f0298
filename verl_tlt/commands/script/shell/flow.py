"""Reads a shell script as bash would carry it out, and notes how it starts `main_ppo`. No line of it is run.

Assignments, tests, branches, loops and functions are followed; of programs only a few whose answer is known
(`dirname`, `command -v`, `python -c 'import x'`) are answered, and the others are passed over. A branch that hangs on
something unknown is taken if `main_ppo` is started in it alone; otherwise what it assigns is unknown from there on.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.commands.script.shell.syntax import MAIN, WORDS, gives_up, parse, shorten, spans_of, text_of, walk
from verl_tlt.commands.script.shell.variables import Variables
from verl_tlt.commands.script.shell.words import MARK, Stopped, Unreadable, Value
from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STEPS = 20_000
"""Commands of a script, each turn of a loop counted."""


@dataclass(frozen=True)
class Start:
    """A command that starts `main_ppo`."""

    words: tuple[str, ...]
    """After the name of the module."""
    environment: Mapping[str, str]
    directory: str
    line: int


class Jump(Exception):
    """`exit`, `return`, `break` or `continue`, with the status it leaves."""

    def __init__(self, kind: str, status: int | None = 0) -> None:
        super().__init__(kind)
        self.kind, self.status = kind, status


class Shell(Variables):
    """A bash that follows a script; `starts` is what came of it."""

    def __init__(self, script: str, arguments: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        variables: dict[str, Value] = {"HOSTNAME": os.uname().nodename, "UID": str(os.getuid()), **environment}
        super().__init__(script, arguments, {**variables, "BASH_SOURCE": [script], "IFS": " \t\n"}, directory)
        self.exported = set(environment)
        self.functions: dict[str, Node] = {}
        self.starts: list[Start] = []
        self.others: list[str] = []
        """Python programs that it starts besides, their first words."""
        self.printed: list[str | None] | None = None
        """Within a substitution, what was printed; None in it: by a program, so not known."""
        self.ends_on_failure, self.guarded, self.depth = False, 0, 0
        self.steps = [0]
        self.main_is_in: set[str] = set()
        """Functions that start `main_ppo`."""

    def follow(self, root: Node) -> None:
        """Carry out a script up to its end."""
        with contextlib.suppress(Jump):
            self.sequence(root.children)

    def inner(self) -> Shell:
        """A subshell: it sees everything, and what it sets is its own."""
        other = copy.copy(self)
        other.variables, other.arguments, other.exported = (
            dict(self.variables),
            list(self.arguments),
            set(self.exported),
        )
        other.functions = dict(self.functions)
        return other

    # ------------------------------------------------------------------ structure

    def sequence(self, nodes: Sequence[Node]) -> int | None:
        """The status of the last of some commands."""
        status: int | None = 0
        for node in nodes:
            if not node.is_named or node.type == "comment":
                continue
            status = self.run(node)
            self.status = self.mark(f"`$?` (line {self.line})") if status is None else str(status)
            tested = node.type in ("list", "negated_command", "if_statement", "while_statement", "for_statement")
            if status and self.ends_on_failure and not self.guarded and not tested:
                raise Stopped(f"`{shorten(text_of(node))}` in line {node.start_point.row + 1} fails")
        return status

    def run(self, node: Node) -> int | None:
        """Carry out one node; its status, None where that is not known."""
        self.steps[0] += 1
        if self.steps[0] > MOST_STEPS:
            raise Unreadable(f"more than {MOST_STEPS} commands")
        self.line = node.start_point.row + 1
        handler = getattr(self, f"_{node.type}", None)
        return handler(node) if handler is not None else self._undecided([[node], []], self._cause(node), unknown=True)

    def _program(self, node: Node) -> int | None:
        return self.sequence(node.children)

    def _compound_statement(self, node: Node) -> int | None:
        text = text_of(node)
        if not text.startswith("(("):
            return self.sequence(node.children)
        try:
            return int(self.arithmetic(text[2:-2]) == 0)
        except Unreadable:
            return None

    _do_group = _variable_assignments = _program

    def _subshell(self, node: Node) -> int | None:
        return self._apart(lambda shell: shell.sequence(node.children))

    def _apart(self, do: Callable[[Shell], int | None]) -> int | None:
        """Do something in a subshell."""
        shell = self.inner()
        try:
            return do(shell)
        except Jump as jump:
            return jump.status

    def _pipeline(self, node: Node) -> int | None:
        status: int | None = 0
        for part in node.named_children:

            def one(shell: Shell, part: Node = part) -> int | None:
                shell.printed = None
                return shell.run(part)

            status = self._apart(one)
        if self.printed is not None:
            self.printed.append(None)
        return status if len(node.named_children) == 1 else None

    def _redirected_statement(self, node: Node) -> int | None:
        body = node.child_by_field_name("body")
        if body is None:  # `$(< file)`
            if self.printed is not None:
                self.printed.append(None)
            return 0
        kept, printed = self.printed, False
        for redirect in node.children_by_field_name("redirect"):
            own = text_of(redirect)
            printed = printed or bool(re.match(r"(1|&)?>(?!&1)", own))
        if kept is not None and printed:
            self.printed = []
        try:
            return self.run(body)
        finally:
            self.printed = kept

    def _negated_command(self, node: Node) -> int | None:
        status = self._tested(node.named_children[0])
        return None if status is None else int(not status)

    def _tested(self, node: Node) -> int | None:
        """The status of a command whose failure does not end the script."""
        self.guarded += 1
        try:
            return self.run(node)
        finally:
            self.guarded -= 1

    def _list(self, node: Node) -> int | None:
        left, right = node.named_children[0], node.named_children[-1]
        wants = 0 if any(child.type == "&&" for child in node.children) else 1
        status = self._tested(left)
        if status is None:
            return self._undecided([[right], []], self._cause(left))
        return self.run(right) if bool(status) == bool(wants) else status

    def _if_statement(self, node: Node) -> int | None:
        """`if` with its `elif` and `else`, the first of which whose test holds is taken."""
        branches: list[tuple[list[Node], list[Node]]] = []
        for clause in [node, *(c for c in node.named_children if c.type in ("elif_clause", "else_clause"))]:
            own = [c for c in clause.children if c.type not in ("elif_clause", "else_clause", "comment")]
            then = next((i for i, c in enumerate(own) if c.type == "then"), 0)
            branches.append(([c for c in own[:then] if c.is_named], [c for c in own[then:] if c.is_named]))
        for i, (tests, body) in enumerate(branches):
            status: int | None = 0
            for test in tests:
                status = self._tested(test)
            if status is None:
                rest = [body for _, body in branches[i:]]
                whole = rest if not branches[-1][0] else [*rest, []]
                return self._undecided(whole, self._cause(*tests))
            if not status:
                return self.sequence(body)
        return 0

    def _case_statement(self, node: Node) -> int | None:
        subject, items = node.named_children[0], [c for c in node.named_children if c.type == "case_item"]
        bodies = []
        for item in items:
            close = next(i for i, c in enumerate(item.children) if c.type == ")")
            patterns = [c for c in item.children[:close] if c.is_named]
            bodies.append((patterns, [c for c in item.children[close + 1 :] if c.is_named]))
        try:
            text = self.known(self.value(text_of(subject)))
            for patterns, body in bodies:
                if any(fnmatch.fnmatchcase(text, self.pattern(text_of(pattern))) for pattern in patterns):
                    return self.sequence(body)
        except Unreadable as error:
            return self._undecided([*(body for _, body in bodies), []], str(error))
        return 0

    def _for_statement(self, node: Node) -> int | None:
        name, body = text_of(node.child_by_field_name("variable") or node), node.child_by_field_name("body")
        values = [c for c in node.named_children if c.type in WORDS]
        if any(c.type == "in" for c in node.children):
            items = [field for value in values for field in self.fields(text_of(value))]
        else:
            items = list(self.arguments)
            self.looked_at.update(items)
        if body is None or node.children[0].type == "select":
            raise Unreadable(f"`{shorten(text_of(node))}` (line {self.line})")
        if unknown := next((item for item in items if MARK.search(item)), None):
            self.variables[name] = unknown
            return self._undecided([[body], []], self.cause_of(unknown))

        def turns() -> Iterator[None]:
            for item in items:
                self.variables[name] = item
                yield

        return self._loop(turns(), body)

    def _while_statement(self, node: Node) -> int | None:
        body, until = node.child_by_field_name("body"), node.children[0].type == "until"
        tests = [c for c in node.named_children if c != body]
        assert body is not None
        unknown = False

        def turns() -> Iterator[None]:
            nonlocal unknown
            while True:
                status: int | None = 0
                for test in tests:
                    status = self._tested(test)
                if status is None:
                    unknown = True
                    return
                if bool(status) != until:
                    return
                yield

        status = self._loop(turns(), body)
        return self._undecided([[body], []], self._cause(*tests)) if unknown else status

    def _loop(self, turns: Iterator[None], body: Node) -> int | None:
        status: int | None = 0
        for _ in turns:
            try:
                status = self.run(body)
            except Jump as jump:
                if jump.kind == "break":
                    break
                if jump.kind != "continue":
                    raise
        return status

    def _function_definition(self, node: Node) -> int | None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[text_of(name)] = body
            if self._starts_main([body]):
                self.main_is_in.add(text_of(name))
        return 0

    # ------------------------------------------------------------------ what cannot be decided

    def _starts_main(self, nodes: Sequence[Node]) -> bool:
        return any(
            MAIN in text_of(node)
            or any(n.type == "command_name" and text_of(n) in self.main_is_in for n in walk(node))
            for node in nodes
        )  # fmt: skip

    def _cause(self, *tests: Node) -> str:
        """What decides a branch, for a sentence."""
        return f"`{shorten(' '.join(map(text_of, tests)))}` (line {tests[0].start_point.row + 1})"

    def _undecided(self, bodies: Sequence[Sequence[Node]], reason: str, unknown: bool = False) -> int | None:
        """Go on after a branch of which it is not known, for this reason, whether it is taken, or what it is."""
        starting = [body for body in bodies if self._starts_main(body)]
        if len(starting) > 1 or (starting and unknown):
            raise Unreadable(f"{reason}, which decides how it starts {MAIN}")
        going_on = starting or [body for body in bodies if not gives_up(body)]
        if len(going_on) == 1 and not unknown:
            return self.sequence(going_on[0])
        for inner in (inner for body in going_on for node in body for inner in walk(node)):
            self._forget(inner, reason)
        return None

    def _forget(self, node: Node, reason: str) -> None:
        """What `node` may have set is not known any more."""
        if node.type in ("variable_assignment", "for_statement"):
            name = node.child_by_field_name("name") or node.child_by_field_name("variable") or node
            known = re.match(r"\w+", text_of(name))
            if known and known[0] != "PWD":
                self.variables[known[0]] = self.mark(reason)
        elif node.type == "unset_command":
            for name in node.named_children:
                if name.type != "variable_name":
                    self.variables["*"] = self.mark(reason)
                else:
                    self.variables[text_of(name)] = self.mark(reason)
        elif node.type == "command":
            words = text_of(node).split()
            if words[0] in ("cd", "pushd"):
                self.directory = self.mark(reason)
            elif words[0] in ("shift", "set", "eval", "source", "."):
                raise Unreadable(f"{reason}, which decides whether `{shorten(text_of(node))}` is carried out")
            elif words[0] in ("read", "mapfile", "readarray", "export", "getopts"):
                for word in words[1:]:
                    self.variables[word.partition("=")[0]] = self.mark(reason)
            elif words[0] in self.functions:
                for inner in walk(self.functions[words[0]]):
                    if inner.type == "variable_assignment":
                        self._forget(inner, reason)

    # ------------------------------------------------------------------ commands

    def substitute(self, command: str) -> str:
        """What `$(command)` prints; a mark where a program would print it."""
        reason, line = f"`$({shorten(command)})` (line {self.line})", self.line
        if not command.strip() or self.depth > 40:
            return "" if self.depth <= 40 else self.mark(reason)
        shell = self.inner()
        shell.printed, shell.depth = [], self.depth + 1
        shell.ends_on_failure = False
        try:
            root = parse(command, self.script)
            shell.sequence(root.children)
        except (TLTError, Unreadable):
            return self.mark(reason)
        except (Stopped, Jump):
            pass
        finally:
            self.line = line
        known = shell.printed or []
        return "".join(self.mark(reason) if part is None else part for part in known).rstrip("\n")

    def call(self, words: Sequence[str]) -> int | None:
        """Carry out a simple command, already expanded; its status, None where that is not known."""
        raise NotImplementedError

    def _command(self, node: Node) -> int | None:
        spans = spans_of(node)
        count = next((i for i, (first, _) in enumerate(spans) if first.type != "variable_assignment"), len(spans))
        after = (node.text or b"")[: spans[count][0].start_byte - node.start_byte] if count < len(spans) else b""
        own, rest = spans[:count], spans[count:]
        names = [re.match(r"\w*", text)[0] for _, text in own]  # type: ignore[index]
        lasting = not rest or re.search(rb"(?<!\\)\n\s*$", after)  # the parser joins some assignments to the next line
        words = [] if lasting else [field for _, text in rest for field in self.fields(text)]
        before, exported = {name: self.variables.get(name) for name in names}, set(self.exported)
        for first, text in own:
            self._assign(first, text)
        if lasting or not words:
            return self.call([field for _, text in rest for field in self.fields(text)])
        self.exported.update(names)
        try:
            return self.call(words)
        finally:
            self.exported.difference_update(set(names) - exported)
            for name, value in before.items():
                self.variables.pop(name, None)
                if value is not None:
                    self.variables[name] = value
