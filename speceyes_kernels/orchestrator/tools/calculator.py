"""A calculator: arithmetic as people and models write it, evaluated from its syntax tree; nothing else is executed."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

from .base import ToolContext, ToolError, ToolResult

_TYPOGRAPHIC = str.maketrans("\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MINUS SIGN}", "*/-")
_MAX_CHARACTERS = 500
_MAX_BITS = 4096  # of a whole number: 2 ** 4096 has 1,234 digits

_TWO: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ONE: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "sin", "cos", "tan", "log", "log2", "log10", "exp")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd", "lcm", "radians", "degrees")},
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
_NAMES = {"pi": math.pi, "e": math.e}


class CalculatorArguments(BaseModel):
    """Arguments of the calculator."""

    expression: str = Field(description="Arithmetic, such as (3 + 4) * 2 ** 5 or sqrt(2).")


class Calculator:
    """Arithmetic with whole numbers of any size up to 4,096 bits, floats, and common functions."""

    name = "calculator"
    description = "Work out an arithmetic expression."
    schema: type[BaseModel] = CalculatorArguments
    cheap = True

    async def __call__(self, arguments: CalculatorArguments, context: ToolContext) -> ToolResult:
        return ToolResult((calculate(arguments.expression),))


def calculate(expression: str) -> str:
    """The value of an expression, in digits.

    Parameters
    ----------
    expression : str
        Numbers, ``+ - * / // % ** ^``, brackets, the names of common functions; typographic signs and thousands with commas
        are read as well.

    Returns
    -------
    str
        A whole number in full; else 12 significant digits.

    Raises
    ------
    ToolError
        Not arithmetic, undefined, or too large.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"calculator: an expression has at most {_MAX_CHARACTERS} characters, got {len(expression)}")
    text = expression.strip().rstrip("=").translate(_TYPOGRAPHIC).replace("^", "**")
    text = _without_thousands(text)
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError(f"calculator: division by zero in {expression!r}") from None
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ToolError(f"calculator: cannot work out {expression!r}: {str(error) or type(error).__name__}") from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError(f"calculator: {expression!r} is not finite")
        return f"{value:.12g}"
    return str(value)


def _without_thousands(text: str) -> str:
    """1,234,567 -> 1234567, outside brackets of a function (whose commas separate)."""
    if re.search(r"[A-Za-z_]\s*\(", text):
        return text
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _TWO:
            return _bounded(_TWO[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*[_value(argument) for argument in node.args]))
    raise ToolError(f"calculator: {ast.unparse(node)[:80]!r} is no arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent * math.log2(abs(base)) > _MAX_BITS:
        raise ToolError(f"calculator: a power is larger than 2 ** {_MAX_BITS}")
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("calculator: a root of a negative number")
    return _bounded(value)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError(f"calculator: a number is larger than 2 ** {_MAX_BITS}")
    return value
