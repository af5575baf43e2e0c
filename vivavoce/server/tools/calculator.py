"""A calculator: arithmetic in the syntax of Python; the length of expressions and the size of numbers are bounded."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from vivavoce.errors import InputError
from vivavoce.server.tools.interface import BuiltInTool, CallingSession, object_schema, text_argument

MAX_LENGTH = 300
MAX_BITS = 1024  # of an integer, also on the way
MAX_ARGUMENTS = 50
MAX_DIGITS = 30

Number = int | float

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
CONSTANTS = {"pi": math.pi, "e": math.e}
WRITTEN_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "π": "pi", "√": "sqrt"}


def calculator() -> BuiltInTool:
    """The tool `calculate`."""
    functions = ", ".join(FUNCTIONS)
    described = f"Arithmetic such as (3 + 4.5) * 2 ** 3; + - * / // % ** and {functions}, pi, e."
    schema = object_schema({"expression": {"type": "string", "description": described}}, "expression")
    return BuiltInTool("calculate", "Calculates exactly. Use it for every calculation.", schema, _run)


async def _run(arguments: Mapping[str, Any], session: CallingSession) -> str:
    return written(evaluate(text_argument(arguments, "expression", MAX_LENGTH)))


def evaluate(expression: str) -> Number:
    """The value of an expression; InputError where it has none, or one that is too large."""
    for sign, plain in WRITTEN_SIGNS.items():
        expression = expression.replace(sign, plain)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except InputError:
        raise
    except ZeroDivisionError as error:
        raise InputError("the expression divides by zero") from error
    except (OverflowError, MemoryError) as error:
        raise InputError("a number of the expression is too large") from error
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise InputError("the expression cannot be calculated: write it as 2 * (3 + 4)") from error


def written(value: Number) -> str:
    """A number in digits; 12 of them where it is not an integer."""
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in OPERATORS:
            return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = FUNCTIONS.get(node.func.id)
        if function is not None and len(node.args) <= MAX_ARGUMENTS:
            return _bounded(function(*map(_value, node.args)))
    raise InputError("the expression has something else than numbers, operators and the functions of a calculator")


def _power(base: Number, exponent: Number) -> Number:
    """A power, refused before it is computed where it would be too large."""
    is_integer = isinstance(base, int) and isinstance(exponent, int)
    if is_integer and abs(base) > 1 and int(base).bit_length() * exponent > MAX_BITS:
        raise InputError("a number of the expression is too large")
    return _bounded(base**exponent)


def _round(value: Number, digits: int = 0) -> Number:
    """Rounded to digits behind the point; Python computes 10 ** -digits where they are negative."""
    if type(digits) is not int or abs(digits) > MAX_DIGITS:
        raise InputError(f"numbers are rounded to at most {MAX_DIGITS} digits")
    return round(value, digits) if digits else round(value)


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise InputError("a number of the expression is too large")
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError("the expression has no value that is a finite number")
    return value


FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{"abs": abs, "round": _round, "min": min, "max": max},
    **{name: getattr(math, name) for name in ("sqrt", "floor", "ceil", "exp", "log", "log10", "sin", "cos", "tan")},
}
