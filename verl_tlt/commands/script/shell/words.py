"""What bash makes of a word: quotes, variables, defaults, arithmetic, braces and patterns. Nothing is run.

What only a run could tell stays in a value as a mark (`Words.mark`): characters that no script may contain.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tlt.commands.script.shell.syntax import LONGEST, shorten

MARK = re.compile("\ue000([0-9]+)\ue001")
MOST_WORDS = 10_000
"""Of one pair of braces."""
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"(!?)(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OPERATOR = re.compile(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:|$")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
Value = str | list[str] | dict[str, str]


class Unreadable(Exception):
    """What cannot be known without running the script; its text is the cause, as it can follow "from"."""


class Stopped(Exception):
    """Bash would end the script here, for this reason."""


@dataclass(frozen=True)
class Piece:
    """Part of a word; what is not quoted is split at spaces and matched against files."""

    text: str
    quoted: bool


class Words:
    """The variables of a shell, and words expanded with them."""

    def __init__(self, script: str, arguments: Sequence[str], variables: dict[str, Value], directory: str) -> None:
        self.script, self.arguments, self.variables = script, list(arguments), variables
        self.directory, self.line, self.status = directory, 0, "0"
        self.strict = False
        """Whether a variable that is not set ends the script (`set -u`)."""
        self.reasons: list[str] = []
        """Of each mark, why its text is not known."""
        self.exported: set[str] = set()
        self.made: set[str] = set()
        """Directories that the script makes."""
        self.looked_at: set[str] = set()
        """Arguments that the script has expanded."""

    def substitute(self, command: str) -> str:
        """What a command prints."""
        raise NotImplementedError

    def arithmetic(self, text: str) -> int:
        """The value of `$((text))`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ marks

    def mark(self, reason: str) -> str:
        """Stands in a value for a text that is not known."""
        self.reasons.append(reason)
        return f"\ue000{len(self.reasons) - 1}\ue001"

    def cause_of(self, text: str) -> str:
        """Why `text`, which has a mark, is not known."""
        found = MARK.search(text)
        return self.reasons[int(found[1])] if found else ""

    def known(self, text: str) -> str:
        """`text` where all of it is known."""
        if MARK.search(text):
            raise Unreadable(self.cause_of(text))
        return text

    # ------------------------------------------------------------------ words

    def fields(self, text: str) -> list[str]:
        """The words that an argument becomes."""
        text = re.sub(r"^([A-Za-z_]\w*=)?~(?=/|$)", r'\1"$HOME"', text)
        return [field for one in braces(text) for field in self._split(self.pieces(one))]

    def value(self, text: str) -> str:
        """The text that a variable is given; it is not split."""
        text = re.sub(r"(^|:)~(?=/|:|$)", r'\1"$HOME"', text)
        return "".join(" " if piece is None else piece.text for piece in self.pieces(text))

    def pattern(self, text: str) -> str:
        """A pattern as `fnmatch` has it: what is quoted has no wildcards."""
        parts = [piece for piece in self.pieces(text) if piece is not None]
        if any(re.search(r"[@+!?*]\(", part.text) for part in parts if not part.quoted):
            raise Unreadable(f"the pattern {text}")
        return self.known("".join(glob.escape(part.text) if part.quoted else part.text for part in parts))

    def _split(self, pieces: Sequence[Piece | None]) -> list[str]:
        found: list[str] = []
        text, pattern, solid = "", "", False

        def end() -> None:
            nonlocal text, pattern, solid
            if solid:
                there = glob.has_magic(pattern) and not MARK.search(pattern)
                matches = glob.glob(pattern, root_dir=self.directory) if there else []
                found.extend(sorted(matches) or [text])
            text, pattern, solid = "", "", False

        for piece in pieces:
            if piece is None:
                end()
            elif piece.quoted:
                text, pattern, solid = text + piece.text, pattern + glob.escape(piece.text), True
            else:
                for i, part in enumerate(re.split(r"[ \t\n]+", piece.text)):
                    if i:
                        end()
                    text, pattern, solid = text + part, pattern + part, solid or bool(part)
        end()
        return found

    def pieces(self, text: str, quoted: bool = False) -> list[Piece | None]:
        """A word taken apart and expanded; None separates words that are separate whatever they hold."""
        out: list[Piece | None] = []
        try:
            at = 0
            while at < len(text):
                at = self._piece(text, at, quoted, out)
        except (IndexError, ValueError):
            out = [Piece(self.mark(f"`{shorten(text)}` (line {self.line})"), quoted)]
        if sum(len(piece.text) for piece in out if piece) > LONGEST:
            raise Unreadable(f"a value of over {LONGEST} characters (line {self.line})")
        return out

    def _piece(self, text: str, at: int, quoted: bool, out: list[Piece | None]) -> int:
        """Expand what begins at `at`; returns where the next piece begins."""
        char = text[at]
        if (quoted and char in "'\"") or char not in "\\'\"$`":
            if char == '"':  # within "${...}"
                return at + 1
            found = re.compile(r"[^\\'\"$`]+|'").match(text, at)
            assert found is not None
            out.append(Piece(found[0], quoted))
            return found.end()
        end = _skip(text, at, quoted)
        if char == "\\":
            after = text[at + 1]
            plain = quoted and after not in '$`"\\\n'
            out.append(Piece("\\" + after if plain else "" if after == "\n" else after, True))
        elif char == "'":
            out.append(Piece(text[at + 1 : end - 1], True))
        elif char == '"':
            inner = self.pieces(text[at + 1 : end - 1], quoted=True)
            out.extend(inner if end - at > 2 else [Piece("", True)])
        else:
            return self._dollar(text, at, quoted, out)
        return end

    def _dollar(self, text: str, at: int, quoted: bool, out: list[Piece | None]) -> int:
        end = _skip(text, at, quoted)
        whole = text[at:end]
        try:
            if whole.startswith("$((") and whole.endswith("))"):
                out.append(Piece(str(self.arithmetic(whole[3:-2])), quoted))
            elif whole[0] == "`":
                out.append(Piece(self.substitute(re.sub(r"\\([$`\\])", r"\1", whole[1:-1])), quoted))
            elif whole.startswith("$("):
                out.append(Piece(self.substitute(whole[2:-1]), quoted))
            elif whole.startswith("${"):
                self._braced(whole[2:-1], quoted, out)
            elif text.startswith("$'", at) and not quoted:
                end = at + 2
                while text[end] != "'":
                    end += 2 if text[end] == "\\" else 1
                if re.search(r"\\[0-7xuUc]", text[at:end]):
                    raise Unreadable(f"`{shorten(text)}` (line {self.line})")
                inner = re.sub(r"\\(.)", lambda m: _ANSI.get(m[1], m[1]), text[at + 2 : end], flags=re.DOTALL)
                out.append(Piece(inner, True))
                end += 1
            elif text.startswith('$"', at) and not quoted:
                return at + 1
            elif name := _NAME.match(text, at + 1):
                end = name.end()
                self._braced(name[0], quoted, out)
            else:
                out.append(Piece("$", quoted))
        except Unreadable as error:
            out.append(Piece(self.mark(str(error)), quoted))
        return end

    # ------------------------------------------------------------------ variables

    def lookup(self, name: str) -> Value | None:
        """The value of a variable or of an argument; None: it is not set."""
        if name in ("@", "*") or name.isdigit():
            if name == "0":
                return self.script
            self.looked_at.update(self.arguments if name in "@*" else self.arguments[int(name) - 1 : int(name)])
            if name in "@*":
                return list(self.arguments)
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
        if name in ("#", "?"):
            return str(len(self.arguments)) if name == "#" else self.status
        if name in ("$", "!", "-") or (name in ("RANDOM", "SECONDS", "BASHPID") and name not in self.variables):
            raise Unreadable(f"`${name}` (line {self.line})")
        if name == "PWD":
            return self.directory
        return self.variables.get(name)

    def _element(self, name: str, index: str | None) -> Value | None:
        """The value of `name` or, with an index, of a part of it."""
        found = self.lookup(name)
        if index in ("@", "*"):
            found = list(found.values()) if isinstance(found, dict) else found
            return [found] if isinstance(found, str) else found or []
        if isinstance(found, dict):
            return found.get(self.known(self.value(index or "0")))
        if isinstance(found, list) and name not in ("@", "*"):
            at = self.arithmetic(index or "0")
            return found[at] if -len(found) <= at < len(found) else None
        return found

    def _braced(self, body: str, quoted: bool, out: list[Piece | None]) -> None:
        """`${body}`."""
        if body in ("#", "@", "*"):
            indirect, length, name, index, rest = "", "", body, None, ""
        elif match := _BRACED.fullmatch(body):
            indirect, length, name, index, rest = match.groups()
        else:
            raise Unreadable(f"`${{{shorten(body)}}}` (line {self.line})")
        if indirect:
            target = self.known(str(self.lookup(name) or ""))
            if index or not re.fullmatch(r"\w+(\[[@*\w]+\])?", target):
                raise Unreadable(f"`${{{shorten(body)}}}` (line {self.line})")
            self._braced(target + rest, quoted, out)
            return
        found = self._element(name, index)
        sign = _OPERATOR.match(rest)
        if sign is None:
            raise Unreadable(f"`${{{shorten(body)}}}` (line {self.line})")
        if sign[0] not in ("", ":") and sign[0][-1] in "-=+?":
            self._default(name, found, sign[0], rest[sign.end() :], quoted, out)
            return
        if found is None:
            if self.strict:
                raise Stopped(f"{name}: unbound variable")
            found = ""
        if length:
            count = len(found) if isinstance(found, list) else len(self.known(str(found)))
            out.append(Piece(str(count), quoted))
            return
        found = self._changed(name, found, sign[0], rest[sign.end() :]) if rest else found
        self._emit(found, quoted, "*" in (name, index), out)

    def _default(
        self, name: str, found: Value | None, sign: str, rest: str, quoted: bool, out: list[Piece | None]
    ) -> None:
        """`${name:-rest}` and its like."""
        empty = found is None or found == [] or (sign[0] == ":" and found in ("", [""]))
        if sign[-1] == "+":
            out.extend([] if empty else self.pieces(rest, quoted))
            if quoted and empty and not isinstance(found, list):
                out.append(Piece("", True))
        elif not empty and found is not None:
            self._emit(found, quoted, name == "*", out)
        elif sign[-1] == "?":
            raise Stopped(f"{name}: {self.value(rest) or 'parameter null or not set'}")
        elif sign[-1] == "=":
            self.variables[name] = self.value(rest)
            out.append(Piece(self.value(rest), quoted))
        else:
            out.extend(self.pieces(rest, quoted) or ([Piece("", True)] if quoted else []))

    def _emit(self, found: Value, quoted: bool, joined: bool, out: list[Piece | None]) -> None:
        if isinstance(found, list):
            if quoted and joined:
                out.append(Piece(str(self.variables.get("IFS", " "))[:1].join(found), True))
                return
            for i, one in enumerate(found):
                out.extend(([None] if i else []) + [Piece(one, quoted)])
        else:
            out.append(Piece(found if isinstance(found, str) else "", quoted))

    def _changed(self, name: str, found: Value, sign: str, rest: str) -> Value:
        """A value cut, replaced or in other letters; each value of an array."""
        if sign == ":" and isinstance(found, list):
            begin, _, count = rest.partition(":")
            values = ([self.script] if name in ("@", "*") else []) + found
            first = self.arithmetic(begin)
            return values[first : first + self.arithmetic(count) if count else None]
        if isinstance(found, list):
            return [self._cut(one, sign, rest) for one in found]
        return self._cut(str(found), sign, rest)

    def _cut(self, text: str, sign: str, rest: str) -> str:
        size = len(self.known(text))
        if size > 5000:
            raise Unreadable(f"a long value (line {self.line})")
        if sign == ":":
            begin, _, count = rest.partition(":")
            first = max(0, self.arithmetic(begin) + (size if self.arithmetic(begin) < 0 else 0))
            last = self.arithmetic(count) if count else size
            return text[first : last if last < 0 else min(size, first + last) if count else size]
        if sign[0] in "^,":
            change = str.upper if sign[0] == "^" else str.lower
            return change(text) if len(sign) == 2 else change(text[:1]) + text[1:]
        if sign[0] in "#%":
            pattern, front = self.pattern(rest), sign[0] == "#"
            cuts = range(size + 1) if front == (len(sign) == 1) else range(size, -1, -1)
            kept = next((c for c in cuts if fnmatch.fnmatchcase(text[:c] if front else text[c:], pattern)), None)
            return text if kept is None else text[kept:] if front else text[:kept]
        raise Unreadable(f"`${{...{sign}{shorten(rest)}}}` (line {self.line})")


def braces(text: str) -> list[str]:
    """`a{b,c}` and `a{1..3}` as the words they stand for."""
    at = 0
    while at < len(text):
        if text[at] != "{":
            try:
                at = _skip(text, at)
            except (IndexError, ValueError):
                break
            continue
        cuts, depth, end = [at], 0, at + 1
        while end < len(text) and (depth or text[end] != "}"):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if text[end] == "," and not depth:
                cuts.append(end)
            try:
                end = _skip(text, end)
            except (IndexError, ValueError):
                return [text]
        if end >= len(text):
            break
        numbers = re.fullmatch(r"(-?\d{1,4})\.\.(-?\d{1,4})", text[at + 1 : end])
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            parts = [str(n) for n in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)]
        elif len(cuts) > 1:
            parts = [text[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
        else:
            at += 1
            continue
        rest = braces(text[end + 1 :])
        words = (text[:at] + one + tail for part in parts for one in braces(part) for tail in rest)
        return list(itertools.islice(words, MOST_WORDS))
    return [text]


def _skip(text: str, at: int, quoted: bool = False) -> int:
    """Where the quote, expansion or character ends that begins at `at`; an IndexError where it does not end."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "'" and not quoted:
        return text.index("'", at + 1) + 1
    if text[at] == '"':
        return _until(text, at + 1, '"', quoted=True)
    if text[at] == "`":
        at += 1
        while text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return at + 1
    if text.startswith("${", at):
        return _until(text, at + 2, "}", quoted)
    return _until(text, at + 2, ")") if text.startswith("$(", at) else at + 1


def _until(text: str, at: int, close: str, quoted: bool = False) -> int:
    while text[at] != close:
        at = _until(text, at + 1, ")") if text[at] == "(" and close == ")" else _skip(text, at, quoted)
    return at + 1
