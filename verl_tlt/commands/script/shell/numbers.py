"""Arithmetic of a shell: `$((...))`, of whole numbers of 64 bits."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from verl_tlt.commands.script.shell.syntax import shorten
from verl_tlt.commands.script.shell.words import Stopped, Unreadable, Words

_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class Numbers(Words):
    """Words, and numbers computed of them."""

    def arithmetic(self, text: str) -> int:
        """The value of `$((text))`; what it assigns is assigned."""
        text = self.known("".join(piece.text for piece in self.pieces(text, quoted=True) if piece)).strip()
        if step := re.fullmatch(r"(\+\+|--)?([A-Za-z_]\w*)(\+\+|--)?", text):
            before = self._number(step[2])
            if step[1] or step[3]:
                after = before + (1 if "+" in (step[1] or step[3]) else -1)
                self.variables[step[2]] = str(after)
                return after if step[1] else before
            return before
        if given := re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL):
            right = f"{given[1]} {given[2]} ({given[3]})" if given[2] else given[3]
            self.variables[given[1]] = str(self.arithmetic(right))
            return int(str(self.variables[given[1]]))
        python = text.replace("&&", " and ").replace("||", " or ")
        python = re.sub(r"!(?!=)", " not ", python)
        try:
            return self._computed(ast.parse(python or "0", mode="eval").body)
        except (SyntaxError, ArithmeticError, KeyError, ValueError, MemoryError):
            raise Unreadable(f"`(({shorten(text)}))` (line {self.line})") from None

    def _number(self, name: str) -> int:
        found = self.lookup(name)
        if found is None and self.strict:
            raise Stopped(f"{name}: unbound variable")
        found = found[0] if isinstance(found, list) and found else found
        text = self.known(found) if isinstance(found, str) else ""
        return int(text) if re.fullmatch(r"\s*-?\d{1,18}\s*", text) else self.arithmetic(text) if text.strip() else 0

    def _computed(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return self._number(name)
            case ast.BoolOp(op=op, values=values):
                results = (bool(self._computed(value)) for value in values)
                return int(all(results) if isinstance(op, ast.And) else any(results))
            case ast.UnaryOp(op=op, operand=operand):
                inner = self._computed(operand)
                return int(not inner) if isinstance(op, ast.Not) else -inner if isinstance(op, ast.USub) else inner
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return int(_BINARY[type(op)](self._computed(left), self._computed(right)))
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._computed(left), self._computed(right)
                if isinstance(op, ast.Pow):
                    found = a**b if 0 <= b <= 64 else 0
                elif isinstance(op, ast.Div | ast.Mod):  # towards zero
                    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                    found = quotient if isinstance(op, ast.Div) else a - b * quotient
                else:
                    found = _BINARY[type(op)](a, b)
                return (found + 2**63) % 2**64 - 2**63
        raise KeyError(ast.dump(node))
