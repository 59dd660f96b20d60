"""The evaluators that verifiers of reasoning-gym call on a completion, made to read data and formulas only.

In: the library's modules. Out: the same modules, in which `eval` reads literals and `parse_expr` reads
mathematics. Invariant: every answer that the library itself stores reads as before.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Callable
from typing import Any

LITERALS = (
    "algorithmic.string_insertion",
    "algorithmic.spiral_matrix",
    "algorithmic.number_sorting",
    "algorithmic.binary_matrix",
    "games.n_queens",
)
FORMULAS = (
    "algebra.simple_integration",
    "algebra.intermediate_integration",
    "algebra.polynomial_multiplication",
    "games.puzzle24",
    "games.countdown",
)
_NAME = re.compile(r"[^\W\d]\w*")
_NO_FORMULA = re.compile(r"""["'`\[\]{}:;@\\#]|__|\.\s*[^\W\d]|\blambda\b""")


def guard_evaluators() -> None:
    """Raises AttributeError or ImportError when the library's release has none of what is replaced."""
    for name in LITERALS:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = _literal
    read = formula_reader(importlib.import_module("sympy"))
    for name in FORMULAS:
        module = importlib.import_module(f"reasoning_gym.{name}")
        if "parse_expr" in vars(module):
            vars(module)["parse_expr"] = read
        else:
            alias = "sp" if "sp" in vars(module) else "sympy"
            vars(module)[alias] = _Reading(getattr(module, alias), read)


class _Reading:
    """The library sympy with another `parse_expr`, for one module alone."""

    def __init__(self, library: Any, read: Callable[..., Any]) -> None:
        self.parse_expr = read
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def _literal(text: str) -> Any:
    return ast.literal_eval(text.strip())


def formula_reader(sympy: Any) -> Callable[..., Any]:
    """`sympy.parse_expr`, which is an `eval`, for texts whose every name is a variable, a constant or a
    function of mathematics. Raises ValueError for others."""
    known, plain = vars(sympy), vars(builtins)
    functions = {"sqrt", "cbrt", "root", "Rational", "Integer", "Float", "Symbol"}

    def mathematical(name: str) -> bool:
        found = known.get(name)
        if found is None:
            return name not in plain or name in ("abs", "max", "min", "pow", "round")
        is_function = isinstance(found, type) and issubclass(found, sympy.Function)
        return name in functions or is_function or isinstance(found, sympy.Basic)

    def read(text: str, *more: Any, **named: Any) -> Any:
        if _NO_FORMULA.search(text) or not all(mathematical(name) for name in _NAME.findall(text)):
            raise ValueError("an answer may only hold numbers, names of variables and functions of mathematics")
        return sympy.parse_expr(text, *more, **named)

    return read
