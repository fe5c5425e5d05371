"""Files of the examples, changed at random: what cannot run is refused as the file's mistake.

A value is replaced by one of another kind, a key is dropped, misspelt, moved up or wrapped.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from rllib_llm.runs.doctor.examine import run_rules
from rllib_llm.runs.plan import check_experiments
from rllib_llm.runs.yaml_loader import load
from rllib_llm.shared.errors import Problems

FILES = sorted(
    file
    for kind in ("arithmetic", "calculator", "reviews")
    for file in (Path(__file__).parents[2] / "tuned_examples").glob(f"{kind}_*.yaml")
)
VALUES = (
    None, "", [], {}, -1, 0, float("inf"), float("nan"), "x", True, [1], {"a": 1}, "${here}",
    "${no.model}", "1e-4", "a b", ["x", None], {"x": {"y": None}}, b"x", {1: 2}, "/", "../x",
    "tune.uniform(0,1)", {"grid_search": [1, 2]}, {"uniform": [0, 1]}, {"grid_search": 3},
)  # fmt: skip
KEYS = ("lr", "model", "stop", "env", "config", "rewards", "prompts", "run", "conversation")


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every path to something inside `value`."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*path, key))


def change(data: Any, random: Random) -> str:
    """Changes one thing in `data`, and says which."""
    *path, key = random.choice([*places(data)])
    holder = data
    for step in path:
        holder = holder[step]
    is_named = isinstance(holder, dict)
    kind = random.choice(["value", "value", "value", "drop", "misspell", "list", "wrap", "add"])
    new = copy.deepcopy(random.choice(VALUES))
    if kind == "drop":
        del holder[key]
    elif kind == "misspell" and is_named:
        place = random.randrange(len(str(key)))
        holder[f"{str(key)[:place]}{random.choice('x_-')}{str(key)[place + 1 :]}"] = holder.pop(key)
    elif kind == "list":
        holder[key] = [holder[key]]
    elif kind == "wrap":
        holder[key] = {"a": holder[key]}
    elif kind == "add" and is_named:
        holder[random.choice(KEYS)] = new
    else:
        holder[key] = new
    return f"{kind} {new!r} at {'.'.join(map(str, (*path, key)))}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_what_cannot_run_is_the_file_s_mistake(seed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    random = Random(seed)
    file = random.choice(FILES)
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    changed = change(data, random)
    refused = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reserved = check_experiments(load(data, str(file), ()), run_rules)
        except Problems as error:
            refused = str(error)
        except Exception as error:
            raise AssertionError(f"{file.name}: {changed}") from error
    # What is refused is told in a sentence or more; what runs has somewhere to run.
    assert refused.strip() if refused else all(each.totals["CPU"] > 0 for each in reserved)
