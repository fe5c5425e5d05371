"""A calculator: arithmetic of numbers, and nothing else that Python can do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_LENGTH = 200  # characters
_MAX_POWER = 64
_MAX_DIGITS = 400


def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and brackets.

    Args:
        expression: the expression, such as "3 * (4 + 5)".
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression must have at most {_MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_POWER:
            raise ValueError(f"powers must be at most {_MAX_POWER}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def _bounded(value: float) -> float:
    """The value; huge ones would take minutes to write."""
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > _MAX_DIGITS * 3:
        raise ValueError(f"numbers must have at most {_MAX_DIGITS} digits")
    return value
