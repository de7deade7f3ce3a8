"""Expressions by which the ledger (files of published claims) computes values to test: arithmetic and function calls.

Python's own parser reads an expression: numbers, strings, names of constants and table columns, `+ - * / **`,
parentheses and calls of known functions. Attributes, subscripts, comprehensions and lambdas are errors, so that a
ledger file from an unknown author cannot run other code.

A rounded or digitised input is an `Uncertain`, and makes the result an interval. The ends of the interval are correct
if the expression is monotone in each input, as sums, products, quotients and powers of positive numbers are.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

Value = int | float | str
LONGEST = 2000
"""Maximum length of a ledger expression, in characters."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: _product(a, b),
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: _power(a, b),
}


class ExpressionError(ValueError):
    """Error of an expression that is invalid, names an unknown function or variable, or cannot be computed."""


@dataclass(frozen=True)
class Uncertain:
    """A number in the interval `[low, high]`, with the best estimate `value`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """Value of a ledger expression and its interval; `low == high == value` for exact inputs and for text."""

    value: Value
    low: Value
    high: Value


@dataclass(frozen=True)
class Expression:
    """Parsed ledger expression. `names` are the variables that it reads, `calls` the functions that it calls."""

    text: str
    tree: ast.expr
    names: frozenset[str]
    calls: frozenset[str]


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Parse a ledger expression. Raises `ExpressionError` if the text is not plain arithmetic with function calls."""
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"the text is not an expression ({error.args[0]})") from None
    names: set[str] = set()
    calls: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Constant):
            if type(node.value) not in (int, float, str):
                raise ExpressionError(f"{node.value!r} is not a number or a string")
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.BinOp):
            if type(node.op) not in _OPERATORS:
                raise ExpressionError(f"operator {type(node.op).__name__} is not one of + - * / **")
            todo += [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            todo.append(node.operand)
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                raise ExpressionError(f"{ast.unparse(node.func)} is no function for claims")
            if any(isinstance(a, ast.Starred) for a in node.args) or any(
                k.arg is None for k in node.keywords
            ):
                raise ExpressionError("function calls must list their arguments, without * or **")
            calls.add(node.func.id)
            todo += [*node.args, *(keyword.value for keyword in node.keywords)]
        else:
            raise ExpressionError(f"{ast.unparse(node)} is not arithmetic")
    return Expression(text, tree, frozenset(names), frozenset(calls))


def check_expression(
    expression: Expression, functions: Mapping[str, Callable[..., Any]], names: frozenset[str]
) -> None:
    """Raise `ExpressionError` for an unknown function, an unknown variable or wrong arguments in an expression."""
    for node in ast.walk(expression.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = functions.get(node.func.id)
            if function is None:
                raise ExpressionError(f"unknown function {node.func.id}{_near(node.func.id, functions)}")
            try:
                _signature(function).bind(*node.args, **{str(k.arg): k.value for k in node.keywords})
            except TypeError as error:
                raise ExpressionError(f"{node.func.id}{_signature(function)}: {error}") from None
    for name in sorted(expression.names):
        if name not in names:
            raise ExpressionError(f"unknown name {name}{_near(name, names)}")


def evaluate_expression(
    expression: Expression,
    functions: Mapping[str, Callable[..., Any]],
    variables: Mapping[str, Value | Uncertain],
) -> Result:
    """Return the value of an expression, and its interval if inputs are uncertain.

    Raises `ExpressionError` if the arithmetic fails (division by zero, overflow).  Errors of the called functions,
    such as a missing record, propagate.
    """
    uncertain: dict[str, Uncertain] = {}
    value = _walk(expression.tree, functions, variables, uncertain, {})
    if not uncertain:
        return Result(value, value, value)

    def evaluate_with(chosen: Mapping[str, float]) -> Any:
        return _walk(expression.tree, functions, variables, {}, chosen)

    lowest, highest = {}, {}
    for key, interval in uncertain.items():
        ends = sorted((interval.low, interval.high), key=lambda end: evaluate_with({key: end}))
        lowest[key], highest[key] = ends
    return Result(value, evaluate_with(lowest), evaluate_with(highest))


def texts(expression: Expression, variables: Mapping[str, Any]) -> list[str]:
    """Return the string values in a ledger expression, such as names of experiments; `"a" + "b"` is one value."""
    found: list[str] = []
    todo: list[ast.AST] = [expression.tree]
    while todo:
        node = todo.pop()
        text = _text(node, variables)
        if text is None:
            todo += ast.iter_child_nodes(node)
        else:
            found.append(text)
    return found


def arguments(expression: Expression, variables: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the function name and the string arguments (such as experiments) of every call in an expression."""
    found = []
    for node in ast.walk(expression.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = (_text(argument, variables) for argument in node.args)
            found.append((node.func.id, tuple(text for text in given if text is not None)))
    return found


def quotient(expression: Expression, variables: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return `a`, `b`, `name` if an expression is `metric(a, name) / metric(b, name)` of two experiments, or None."""
    tree = expression.tree
    if not (isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Div)):
        return None
    sides = [
        tuple(_text(argument, variables) for argument in side.args)
        for side in (tree.left, tree.right)
        if isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "metric"
    ]
    if len(sides) != 2 or len(sides[0]) != 2 or len(sides[1]) != 2:
        return None
    (above, name), (below, other) = sides
    return (above, below, name) if above and below and name and name == other else None


def literals(expression: Expression, skip: AbstractSet[str] = frozenset()) -> list[float]:
    """Return the number literals in an expression, except literals inside calls of the functions `skip`."""
    found: list[float] = []
    todo: list[ast.AST] = [expression.tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in skip:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            found.append(float(node.value))
        todo += ast.iter_child_nodes(node)
    return found


def replace_number(expression: Expression, old: float, new: float) -> Expression:
    """Return a copy of an expression in which the number `new` replaces every literal of the number `old`."""
    tree = copy.deepcopy(expression.tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and not isinstance(node.value, str) and node.value == old:
            node.value = type(node.value)(new)
    return replace(expression, tree=tree)


def _text(node: ast.AST, variables: Mapping[str, Any]) -> str | None:
    """Return the string value of a syntax node of an expression; None if the node is not a string."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, variables), _text(node.right, variables)
        return None if left is None or right is None else left + right
    text = variables.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return text if isinstance(text, str) else None


def _walk(
    node: ast.expr,
    functions: Mapping[str, Callable[..., Any]],
    variables: Mapping[str, Value | Uncertain],
    seen: dict[str, Uncertain],
    chosen: Mapping[str, float],
) -> Any:
    """Return the value of a syntax node of an expression.

    Uncertain inputs are added to `seen`. An uncertain input has its value from `chosen`, or else its best estimate.
    """

    def settle(key: str, value: Any) -> Any:
        if isinstance(value, Uncertain):
            seen[key] = value
            return chosen.get(key, value.value)
        return value

    def walk(inner: ast.expr) -> Any:
        return _walk(inner, functions, variables, seen, chosen)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return settle(node.id, variables[node.id])
    try:
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand) if isinstance(node.op, ast.USub) else walk(node.operand)
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
    except (ArithmeticError, TypeError) as error:
        raise ExpressionError(f"{ast.unparse(node)}: {error}") from None
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    positional = [walk(argument) for argument in node.args]
    keyword = {str(argument.arg): walk(argument.value) for argument in node.keywords}
    try:
        # The call's position in the text is the key: equal values read from figures, digitised(), err independently.
        key = f"{node.func.id}@{node.lineno}:{node.col_offset}"
        return settle(key, functions[node.func.id](*positional, **keyword))
    except (ArithmeticError, TypeError) as error:
        raise ExpressionError(f"{ast.unparse(node)}: {error}") from None


def _product(left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str):
        raise TypeError("a string cannot be multiplied")
    return left * right


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > 64:
        raise ArithmeticError("an exponent must be between -64 and 64")
    result = base**exponent
    if isinstance(result, complex) or (isinstance(result, float) and math.isnan(result)):
        raise ArithmeticError("the result of ** is not a real number")
    return result


@lru_cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _near(name: str, known: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
