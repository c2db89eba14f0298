"""The tool of `grpo_tools_qwen3_4b.sh`: sums and products of plain numbers, for verl's `function_tool_path`."""

import ast
import operator

from verl.tools.function_tool import function_tool

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters: the policy chooses the expression


@function_tool
def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, for example "12 * (3 + 4)".
    """
    if len(expression) > LONGEST:
        return "error: the expression is too long"
    try:
        return f"{value(ast.parse(expression, mode='eval').body):.15g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError) as error:
        return f"error: {error}"


def value(node: ast.expr) -> float:
    """The value of a parsed expression; whatever is not plain arithmetic raises ValueError."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("only numbers, + - * / and parentheses are understood")
