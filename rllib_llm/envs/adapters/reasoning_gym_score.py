"""Scores answers by reasoning-gym; runs in a sandboxed process, see `envs/sandbox.py`.

Several data sets evaluate answers, by `eval` or through sympy. Where they want a literal they get
no more than that, and sympy reads formulas only: no answer computes its own score. The rest is held
by the sandbox.
"""

from __future__ import annotations

import ast
import base64
import cmath
import contextlib
import functools
import inspect
import math
import pickle
import sys
from typing import Any

import reasoning_gym

_FORMULA = (
    ast.Expression, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Call, ast.Name, ast.Load,
    ast.Constant, ast.Tuple,
)  # fmt: skip
_MAKERS = ("Symbol", "Integer", "Float", "Rational", "Function")  # which sympy's reader writes
_MORE = ("Add", "Mul", "Pow", "Integral", "sqrt", "cbrt", "root", "max", "min", "Max", "Min")
_refused: list[str] = []  # of the answer that is scored


def score(name: str, config: str, entry: str, answer: str | None) -> float:
    """The data set's own score of what a model wrote; raises whatever the data set raises. `config`
    and `entry`: its configuration and the task, pickled by the caller, in base64."""
    # NaN is at no distance from anything: some data sets take it for right.
    with contextlib.suppress(ValueError):
        if cmath.isnan(complex((answer or "").replace(" ", "").replace("i", "j"))):
            return 0.0
    _refused.clear()
    found = float(dataset(name, config).score_answer(answer, packed(entry)))
    if _refused:
        return 0.0
    if not math.isfinite(found):
        raise ValueError(f"the score is {found}")
    return found


def packed(text: str) -> Any:
    """The pickled object in base64."""
    return pickle.loads(base64.b64decode(text))


@functools.lru_cache(maxsize=256)
def dataset(name: str, config: str) -> Any:
    """The data set, made once in a worker."""
    made = reasoning_gym.create_dataset(name, **packed(config))
    if "eval" in type(made).score_answer.__code__.co_names:
        sys.modules[type(made).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    _guard_sympy()
    return made


@functools.cache
def _guard_sympy() -> None:
    """Restricts sympy's parser to formulas: it would run any text as Python."""
    import sympy.parsing.sympy_parser as parser

    write = parser.stringify_expr

    def checked(text: str, names: Any, known: Any, *rest: Any) -> str:
        code: str = write(text, names, known, *rest)
        if not _is_formula(code, known):
            _refused.append(code)
            raise ValueError("it is no formula")
        return code

    parser.stringify_expr = checked


def _is_formula(code: str, known: dict[str, Any]) -> bool:
    """Whether an expression of sympy's reader calls sympy's own functions alone, and looks into
    nothing. `known`: what its names mean."""
    from sympy import Function

    try:
        tree = ast.parse(code.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    made: set[ast.AST] = {tree}  # functions and texts that stand where they may
    for node in ast.walk(tree):
        if not isinstance(node, _FORMULA):
            return False
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in made:
            return False
        if not isinstance(node, ast.Call):
            continue
        if node.keywords:
            return False
        called = node.func
        if isinstance(called, ast.Name):
            meant = known.get(called.id)
            if called.id in _MAKERS:
                made.update(node.args)
            elif called.id not in _MORE and not (
                isinstance(meant, type) and issubclass(meant, Function)
            ):
                return False
        elif not (  # Function('f')(x)
            isinstance(called, ast.Call)
            and isinstance(called.func, ast.Name)
            and called.func.id == "Function"
        ):
            return False
    return True


def _prepare(name: str, config: str, **task: Any) -> bool:
    """Makes the data set; whether answers to it are evaluated."""
    return _evaluates(name, config)


@functools.cache
def _evaluates(name: str, config: str) -> bool:
    """Whether the code of a data set, or code it uses from reasoning-gym, calls `eval`."""
    modules = {base.__module__ for base in type(dataset(name, config)).__mro__}
    for module in list(modules):
        given = vars(sys.modules[module]).values()
        modules |= {getattr(each, "__module__", None) or "" for each in given}
    ours = [sys.modules[each] for each in modules if each.partition(".")[0] == "reasoning_gym"]
    sources = map(inspect.getsource, ours)
    return any(word in source for source in sources for word in ("eval(", "exec(", "sympy"))


score.prepare = _prepare  # type: ignore[attr-defined]  # before a copy of the worker scores
