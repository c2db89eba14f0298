"""The variables of a shell as assignments and tests use them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_tlt.commands.script.shell.numbers import Numbers
from verl_tlt.commands.script.shell.syntax import shorten, spans_of, text_of
from verl_tlt.commands.script.shell.words import Unreadable

if TYPE_CHECKING:
    from tree_sitter import Node


class Variables(Numbers):
    """Assignments, and what `[` and `[[` find."""

    def _variable_assignment(self, node: Node) -> int | None:
        self._assign(node, text_of(node))
        return 0

    def _assign(self, node: Node, text: str) -> str:
        """Carry out an assignment, whose whole text may be longer than its node; returns the name."""
        match = re.fullmatch(r"(\w+)(?:\[(.*?)\])?(\+?)=(.*)", text, re.DOTALL)
        if match is None:
            raise Unreadable(f"`{shorten(text)}` (line {self.line})")
        name, index, adds, value = match[1], match[2], bool(match[3]), node.child_by_field_name("value")
        if value is not None and value.type == "array":
            self._assign_array(name, value, adds)
        else:
            self.put(name, index, self.value(match[4]), adds)
        return name

    def put(self, name: str, index: str | None, text: str, adds: bool = False) -> None:
        """Give a variable, or a place in it, a text."""
        before = self.variables.get(name)
        if index is None and not isinstance(before, list | dict):
            self.variables[name] = (before or "") + text if adds else text
        elif isinstance(before, dict):
            key = self.known(self.value(index or "0"))
            self.variables[name] = {**before, key: (before.get(key, "") if adds else "") + text}
        else:
            values = list(before) if isinstance(before, list) else [before] if before else []
            at = self.arithmetic(index or "0")
            if not -len(values) <= at <= len(values):
                raise Unreadable(f"`{name}[{index}]` (line {self.line})")
            if at == len(values):
                values.append("")
            values[at] = (values[at] if adds else "") + text
            self.variables[name] = values

    def _assign_array(self, name: str, value: Node, adds: bool) -> None:
        before = self.variables.get(name) if adds else [] if not isinstance(self.variables.get(name), dict) else {}
        texts = [text for _, text in spans_of(value)]
        pairs = [re.fullmatch(r"\[(.*?)\]=(.*)", text, re.DOTALL) for text in texts]
        if isinstance(before, dict):
            found = {self.known(self.value(pair[1])): self.value(pair[2]) for pair in pairs if pair}
            self.variables[name] = {**before, **found}
        elif any(pairs):
            raise Unreadable(f"`{shorten(text_of(value))}` (line {self.line})")
        else:
            old = before if isinstance(before, list) else [before] if before else []
            self.variables[name] = [*old, *(field for text in texts for field in self.fields(text))]

    def _declaration_command(self, node: Node) -> int | None:
        kind = node.children[0].type
        flags = "".join(text_of(c)[1:] for c in node.named_children if re.fullmatch(r"-\w+", text_of(c)))
        for child, text in spans_of(node)[1:]:
            if re.fullmatch(r"[-+]\w+", text):
                continue
            if "A" in flags:
                self.variables.setdefault(text.partition("=")[0], {})
            if child.type == "variable_assignment":
                names = [self._assign(child, text)]
            else:
                names = [self._declare(field) for field in self.fields(text)]
            if "n" in flags and kind == "export":
                self.exported.difference_update(names)
            elif kind == "export" or "x" in flags:
                self.exported.update(names)
        return 0

    def _declare(self, word: str) -> str:
        """`name` or `name=value` given to `export` and its like, already expanded; returns the name."""
        name, equals, value = word.partition("=")
        name = self.known(name)
        if not re.fullmatch(r"\w+", name):
            raise Unreadable(f"`{shorten(word)}` (line {self.line})")
        if equals:
            self.put(name, None, value)
        return name

    def _unset_command(self, node: Node) -> int | None:
        for child in node.named_children:
            for name in self.fields(text_of(child)):
                self.variables.pop(self.known(name), None)
        return 0

    def _test_command(self, node: Node) -> int | None:
        strings = node.children[0].type == "["
        inner = [child for child in node.children[1:-1] if child.is_named]
        try:
            return int(not self._holds(inner[0], strings)) if inner else 1
        except Unreadable:
            return None

    def _holds(self, node: Node, strings: bool) -> bool:
        """Whether a test holds; `strings`: that of `[`, in which the right side is no pattern."""
        if node.type == "parenthesized_expression":
            return self._holds(node.named_children[0], strings)
        if node.type == "unary_expression":
            sign, operand = text_of(node.children[0]), node.children[-1]
            if sign == "!":
                return not self._holds(operand, strings)
            return self._is(sign, self.known(self.value(text_of(operand))))
        if node.type == "negated_command" or (node.type == "list"):
            raise Unreadable(f"`{shorten(text_of(node))}` (line {self.line})")
        if node.type != "binary_expression":
            return bool(self.known(self.value(text_of(node))))
        left, sign, right = node.children[0], text_of(node.children[1]), node.children[-1]
        if sign in ("&&", "-a"):
            return self._holds(left, strings) and self._holds(right, strings)
        if sign in ("||", "-o"):
            return self._holds(left, strings) or self._holds(right, strings)
        first = self.known(self.value(text_of(left)))
        if sign in ("=", "==", "!="):
            pattern = self.known(self.value(text_of(right))) if strings else self.pattern(text_of(right))
            return (first == pattern if strings else fnmatch.fnmatchcase(first, pattern)) == (sign != "!=")
        second = self.known(self.value(text_of(right)))
        if sign in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge"):
            a, b = self.arithmetic(first), self.arithmetic(second)
            return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[sign]
        if sign in ("<", ">"):
            return first < second if sign == "<" else first > second
        raise Unreadable(f"`{shorten(text_of(node))}` (line {self.line})")

    def _is(self, sign: str, text: str) -> bool:
        if sign in ("-n", "-z"):
            return bool(text) == (sign == "-n")
        if sign in ("-v", "-R"):
            return re.match(r"\w+", text) is not None and self.lookup(text.partition("[")[0]) is not None
        path = os.path.join(self.known(self.directory), text)
        asked: dict[str, Callable[[], bool]] = {
            "-e": lambda: os.path.exists(path), "-a": lambda: os.path.exists(path), "-f": lambda: os.path.isfile(path),
            "-d": lambda: os.path.isdir(path) or os.path.normpath(path) in self.made,
            "-s": lambda: os.path.isfile(path) and os.path.getsize(path) > 0, "-L": lambda: os.path.islink(path),
            "-h": lambda: os.path.islink(path), "-r": lambda: os.access(path, os.R_OK),
            "-w": lambda: os.access(path, os.W_OK), "-x": lambda: os.access(path, os.X_OK),
        }  # fmt: skip
        if sign not in asked:
            raise Unreadable(f"`{sign} {shorten(text)}` (line {self.line})")
        return bool(text) and asked[sign]()
