"""A ratchet: how large each room is, how much of it is text and complaints, whether a class name
stands in two files, and that nobody parses what this package itself wrote.

A change that makes a figure larger changes its number here, in the same commit, and says why.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rllib_llm

PACKAGE = Path(rllib_llm.__file__).parent
COMPLAINTS = {"Problem", "Problems", "warning", "note", "wrong", "require", "ApiError"}
WORDS = 4  # of a text that is read by people
# Of each room: lines, and the share (%) of them that are texts and complaints.
ROOMS = {
    "": (52, 1.9),
    "algorithms": (3533, 5.9),
    "checkpoints": (717, 5.7),
    "cli": (2260, 10.4),
    "config": (2970, 28.0),
    "conversations": (1595, 3.1),
    "data": (3325, 6.5),
    "engines": (5289, 2.6),
    "envs": (8274, 7.8),
    "examples": (1441, 4.1),
    "learners": (3067, 1.7),
    "modules": (5636, 3.0),
    "numerics": (1511, 0.6),
    "overseer": (911, 4.4),
    "rollouts": (6316, 1.3),
    "runs": (6713, 8.9),
    "serving": (6172, 6.0),
    "shared": (3194, 3.7),
    "weights": (2259, 1.9),
}
SAME_NAMES = 2  # classes whose name stands in another file as well
RAISES = 499


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if parts[1:] else ""


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def documentation(tree: ast.Module) -> set[int]:
    """Lines of strings that are statements."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and is_text(n.value)]
    return {line for node in found for line in lines_of(node)}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def lines_of(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]


def complaining_lines(tree: ast.Module) -> set[int]:
    """Lines of raised exceptions, of problems, and of texts of several words."""
    found: set[int] = set()
    for node in ast.walk(tree):
        called = getattr(getattr(node, "func", None), "id", "")
        is_sentence = is_text(node) and len(node.value.split()) >= WORDS  # type: ignore[attr-defined]
        if isinstance(node, ast.Raise) or called in COMPLAINTS or is_sentence:
            found |= {*lines_of(node)}
    return found - documentation(tree)


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@cache
def figures() -> dict[str, tuple[int, float]]:
    lines: dict[str, int] = defaultdict(int)
    complaints: dict[str, int] = defaultdict(int)
    for path, tree in trees().items():
        lines[room(path)] += num_lines(path)
        complaints[room(path)] += len(complaining_lines(tree))
    return {name: (lines[name], round(100 * complaints[name] / lines[name], 1)) for name in lines}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_does_not_grow_unnoticed(name: str):
    lines, share = figures()[name]
    most_lines, most_share = ROOMS[name]
    assert lines <= most_lines, "more lines: change the number here and say why in the commit"
    assert share <= most_share, "more of it is text and complaints"


def test_every_room_is_measured():
    assert figures().keys() == ROOMS.keys()


def test_class_names_tell_which_class_is_meant():
    files: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path)
    same = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert len(same) <= SAME_NAMES, same


def test_what_is_wrong_is_raised_in_few_places():
    raised = [n for tree in trees().values() for n in ast.walk(tree) if isinstance(n, ast.Raise)]
    assert len(raised) <= RAISES


# Of a problem and of exceptions: what is written for people.
WRITTEN = {"rule", "reason", "remedy", "sentence", "found"}
SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}


def test_nobody_parses_what_this_package_writes():
    """No regular expression is applied to an exception's text or to a problem's fields."""
    for path, tree in trees().items():
        caught = {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.name}
        for call in calls(tree):
            if getattr(call.func, "attr", "") not in SEARCHES:
                continue
            for argument in call.args:
                for node in ast.walk(argument):
                    is_field = isinstance(node, ast.Attribute) and node.attr in WRITTEN
                    is_error = (
                        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str"
                        and getattr(node.args[0] if node.args else None, "id", "") in caught
                    )  # fmt: skip
                    assert not is_field and not is_error, (path, call.lineno)
