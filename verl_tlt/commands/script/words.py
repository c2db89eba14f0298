"""What bash makes of a word: quotes, variables, defaults, arithmetic, patterns and tests. Nothing is run.

What only a run could tell stays in a value as a mark (`Words.mark`). So does what is not understood here, such as
`${x##*/}`.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import math
import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.commands.script.syntax import LONGEST, MARK, shorten, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

SPACES = " \t\n"
"""Characters at which bash splits what is not quoted, unless the script sets `IFS`."""
Value = str | list[str]
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#])(?:\[(@|[0-9]+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_HIDDEN = re.compile(r"""\\.|'[^']*'|"(\\.|[^"\\])*"|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`""", re.DOTALL)
_CLOSED = re.compile(r"""\\.|'[^']*'|`(\\.|[^\\`])*`""", re.DOTALL)
_BINARY: dict[type, Callable[[int, int], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: math.fmod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


class Unreadable(Exception):
    """What cannot be known without running the script; its text is the cause, as it can follow "from"."""


class Stopped(Exception):
    """Bash would end the script here, for this reason."""


@dataclass(frozen=True)
class Piece:
    """Part of a word; what is not quoted is split at spaces and matched against files."""

    text: str
    quoted: bool


class Words(ABC):
    """The variables of a shell, and words expanded with them."""

    def __init__(self, script: str, arguments: Sequence[str], variables: dict[str, Value], directory: str) -> None:
        self.script, self.arguments, self.variables = script, list(arguments), variables
        self.directory, self.line = directory, 0
        self.options: set[str] = set()
        """Options that `set` has turned on: `e`, `u`, `a`."""
        self.reasons: list[str] = []
        """Why the text of each mark is not known."""
        self.looked_at: set[str] = set()
        """Arguments that the script has expanded."""

    @abstractmethod
    def substitute(self, command: str) -> str:
        """What a command prints."""

    # ------------------------------------------------------------------ marks

    def mark(self, reason: str) -> str:
        """A mark, which stands in a value for a text that is not known."""
        self.reasons.append(reason)
        return f"\ue000{len(self.reasons) - 1}\ue001"

    def cause_of(self, text: str) -> str:
        """Why `text`, which has a mark, is not known."""
        match = MARK.search(text)
        return self.reasons[int(match[1])] if match else ""

    def known(self, text: str) -> str:
        """`text` where all of it is known; else `Unreadable`."""
        if MARK.search(text):
            raise Unreadable(self.cause_of(text))
        return text

    def cause(self, text: str) -> str:
        """A piece of the script that keeps something from being known, for a sentence."""
        return f"`{shorten(text)}` (line {self.line})"

    # ------------------------------------------------------------------ words

    def fields(self, text: str) -> list[str]:
        """The words that an argument becomes."""
        bare = _HIDDEN.sub("", text) if len(text) < 10_000 else text
        if -1 < bare.find("{") < max(bare.rfind(","), bare.rfind("..")) < bare.rfind("}"):  # `a{b,c}` is several words
            return [self.mark(self.cause(text))]
        words: list[list[Piece]] = [[]]
        ifs = str(self.variables.get("IFS", SPACES))
        for piece in self.pieces(re.sub(r"^([A-Za-z_]\w*=)?~(?=/|$)", r'\1"$HOME"', text)):
            if piece is None:
                words.append([])
            elif piece.quoted:
                words[-1].append(piece)
            elif ifs != SPACES and re.search(rf"[\s{'' if MARK.search(ifs) else re.escape(ifs)}]", piece.text):
                words[-1] = [Piece(self.mark(self.cause("IFS")), True)]
            else:
                first, *others = (Piece(text, False) for text in re.split(r"[ \t\n]+", piece.text))
                words[-1].append(first)
                words.extend([other] for other in others)
        return [field for word in words for field in self._matched(word)]

    def value(self, text: str) -> str:
        """The text that a variable is given; it is not split."""
        text = re.sub(r"(^|:)~(?=/|:|$)", r'\1"$HOME"', text)
        return "".join(" " if piece is None else piece.text for piece in self.pieces(text))

    def _matched(self, word: Sequence[Piece]) -> list[str]:
        """The files that a word is a pattern of, or else the word; nothing where it is empty and has no quotes."""
        text, pattern = "".join(piece.text for piece in word), _pattern(word)
        if glob.has_magic(pattern) and not MARK.search(pattern):
            return sorted(glob.glob(pattern, root_dir=self.directory)) or [text]
        return [text] if text or any(piece.quoted for piece in word) else []

    def pieces(self, text: str, quoted: bool = False) -> list[Piece | None]:
        """A word taken apart and expanded; None separates words that are separate whatever they hold."""
        out: list[Piece | None] = []
        at = 0
        try:
            while at < len(text):
                at = self._piece(text, at, quoted, out)
        except (IndexError, ValueError):
            out = [Piece(self.mark(self.cause(text)), quoted)]
        if sum(len(piece.text) for piece in out if piece) > LONGEST:
            raise Unreadable(f"a value of over {LONGEST} characters (line {self.line})")
        return out

    def _piece(self, text: str, at: int, quoted: bool, out: list[Piece | None]) -> int:
        """Expand what begins at `at`; returns where the next piece begins."""
        if plain := re.compile(r"[^\\\"$`]+" if quoted else r"[^\\'\"$`]+").match(text, at):
            out.append(Piece(plain[0], quoted))
            return plain.end()
        if quoted and text[at] == '"':  # within "${...}"
            return at + 1
        end = _skip(text, at, quoted)
        whole = text[at:end]
        if whole[0] == "\\":
            literal = quoted and whole[1] not in '$`"\\\n'
            out.append(Piece(whole if literal else whole[1].strip("\n"), True))
        elif whole[0] == "'":
            out.append(Piece(whole[1:-1], True))
        elif whole[0] == '"':
            out.extend(self.pieces(whole[1:-1], quoted=True) if len(whole) > 2 else [Piece("", True)])
        else:
            name = _NAME.match(text, end) if whole == "$" else None
            end = name.end() if name else end
            try:
                out.extend(self._expanded(text[at:end], quoted, text[end : end + 1]))
            except Unreadable as error:
                out.append(Piece(self.mark(str(error)), quoted))
        return end

    def _expanded(self, whole: str, quoted: bool, after: str) -> list[Piece | None]:
        """What becomes of `$x`, `${x}`, `$((x))` or `$(x)`; `after` is the character behind it."""
        if whole.startswith("$((") and whole.endswith("))"):
            return [Piece(str(self.arithmetic(whole[3:-2])), quoted)]
        if whole.startswith(("$(", "`")):
            inner = whole[2:-1] if whole[0] == "$" else re.sub(r"\\([$`\\])", r"\1", whole[1:-1])
            return [Piece(self.substitute(inner), quoted)]
        if whole != "$":
            return self._variable(whole[2:-1] if whole.startswith("${") else whole[1:], quoted)
        if after in ("'", '"') and not quoted:  # $'\t'
            raise Unreadable(self.cause(whole + after))
        return [Piece("$", quoted)]

    # ------------------------------------------------------------------ variables

    def _variable(self, body: str, quoted: bool) -> list[Piece | None]:
        """What `${body}` becomes."""
        match = _BRACED.fullmatch(body)
        if match is None or (match[1] == "*" and quoted):
            raise Unreadable(self.cause(f"${{{body}}}"))
        name, index, sign, rest = match.groups()
        value = self.lookup(name, index)
        empty = value is None or value == [] or (sign and sign[0] == ":" and value in ("", [""]))
        if sign and sign[-1] == "+":
            return self.pieces(rest, quoted) if not empty else [] if isinstance(value, list) else [Piece("", quoted)]
        if sign and empty:
            if sign[-1] == "?":
                raise Stopped(f"{name}: {MARK.sub('...', self.value(rest)) or 'parameter null or not set'}")
            if sign[-1] == "=":
                self.variables[name] = self.value(rest)
            return self.pieces(rest, quoted) or [Piece("", quoted)]
        if value is None and "u" in self.options:
            raise Stopped(f"{name}: unbound variable")
        if not isinstance(value, list):
            return [Piece(value or "", quoted)]
        return [part for text in value for part in (None, Piece(text, quoted))][1:]

    def lookup(self, name: str, index: str | None = None) -> Value | None:
        """The value of a variable or of an argument, or of an array or a part of it; None: it is not set."""
        if name == "#":
            return str(len(self.arguments))
        if name in ("@", "*"):
            self.looked_at.update(self.arguments)
            return list(self.arguments)
        if name.isdigit() and name != "0":
            values = self.arguments[int(name) - 1 : int(name)]
            self.looked_at.update(values)
            return values[0] if values else None
        if name in ("RANDOM", "SECONDS", "BASHPID") and name not in self.variables:
            raise Unreadable(self.cause(f"${name}"))
        value = {"0": self.script, "PWD": self.directory}.get(name, self.variables.get(name))
        if index == "@":
            return [value] if isinstance(value, str) else value or []
        if isinstance(value, list):
            return next(iter(value[int(index or 0) :]), None)
        return value if index in (None, "0") else None

    def arithmetic(self, text: str) -> int:
        """The value of `$((text))`; variables that it would assign are not known any more."""
        reason = self.cause(f"(({text}))")
        text = "".join(piece.text for piece in self.pieces(text, quoted=True) if piece)
        if re.search(r"\+\+|--|<<=|>>=|(?<![=!<>])=(?!=)", text):
            self.variables.update({name: self.mark(reason) for name in re.findall(r"[A-Za-z_]\w*", text)})
            raise Unreadable(reason)
        numbers = self.known(re.sub(r"(?<!\w)[A-Za-z_]\w*", lambda name: f"({self.value('$' + name[0]) or 0})", text))
        try:
            number = _computed(ast.parse(numbers.strip() or "0", mode="eval").body)
        except (SyntaxError, ArithmeticError, KeyError, ValueError, MemoryError):
            raise Unreadable(reason) from None
        if abs(number) >= 2**53:  # up to there `_BINARY` is exact
            raise Unreadable(reason)
        return number

    # ------------------------------------------------------------------ tests

    def matches(self, text: str, pattern: str) -> bool:
        """Whether a text matches a pattern, which is not expanded yet; one that `fnmatch` lacks cannot be read."""
        parts = [piece for piece in self.pieces(pattern) if piece is not None]
        if any(re.search(r"[@+!?*]\(", part.text) for part in parts if not part.quoted):
            raise Unreadable(self.cause(pattern))
        return fnmatch.fnmatchcase(text, self.known(_pattern(parts)))

    def holds(self, node: Node, strings: bool) -> bool:
        """Whether a test holds; `strings`: it is one of `[`, in which the right side is no pattern."""
        if node.type in ("unary_expression", "binary_expression"):
            left, sign, right = node.children[0], text_of(node.children[-2]), node.children[-1]
        else:
            left, sign, right = node, "-n", node
        if sign == "!":
            return not self.holds(right, strings)
        if sign in ("&&", "||"):
            return self.holds(right if self.holds(left, strings) == (sign == "&&") else left, strings)
        text = self.known(self.value(text_of(right)))
        if sign in ("-n", "-z"):
            return bool(text) == (sign == "-n")
        if sign in ("-e", "-f", "-d"):
            asked = {"-e": os.path.exists, "-f": os.path.isfile, "-d": os.path.isdir}[sign]
            return bool(text) and asked(os.path.join(self.known(self.directory), text))
        first = self.known(self.value(text_of(left)))
        if sign in ("=", "==", "!="):
            return (first == text if strings else self.matches(first, text_of(right))) == (sign != "!=")
        if sign in _COMPARED:
            return bool(self.arithmetic(f"({first or 0}) {_COMPARED[sign]} ({text or 0})"))
        raise Unreadable(self.cause(text_of(node)))


def _pattern(word: Sequence[Piece]) -> str:
    """A word as a pattern of `fnmatch`, in which what is quoted has no wildcards."""
    return "".join(glob.escape(piece.text) if piece.quoted else piece.text for piece in word)


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
            return int(_BINARY[type(op)](_computed(left), _computed(right)))
    raise KeyError(type(node))


def _skip(text: str, at: int, quoted: bool = False) -> int:
    """The end of the quote, expansion or character that begins at `at`; an IndexError where it does not end."""
    if text[at] in "\\`" or (text[at] == "'" and not quoted):
        if (closed := _CLOSED.match(text, at)) is None:
            raise IndexError(text)
        return closed.end()
    if text[at] == '"':
        return _until(text, at + 1, '"', quoted=True)
    if text.startswith("${", at):
        return _until(text, at + 2, "}", quoted)
    return _until(text, at + 2, ")") if text.startswith("$(", at) else at + 1


def _until(text: str, at: int, close: str, quoted: bool = False) -> int:
    while text[at] != close:
        at = _until(text, at + 1, ")") if text[at] == "(" and close == ")" else _skip(text, at, quoted)
    return at + 1
