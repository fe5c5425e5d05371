"""Problems as data, the names that may have been meant, and all problems at once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from rllib_llm.shared.errors import (
    Problem,
    Problems,
    SettingWarning,
    distinct,
    problems_in,
    report,
    shown,
    warning,
)

BROKEN = Problem("top_p", "be at most 1", "it is a probability mass", "Use 1.0", 1.5)


def test_problems_of_a_check_are_returned_also_those_that_it_raises():
    def rule() -> Iterator[Problem]:
        yield BROKEN
        raise ValueError("two")

    def check() -> None:
        raise Problems([BROKEN, BROKEN])

    assert [problem.name for problem in problems_in(rule)] == ["top_p", "two"]
    assert problems_in(check) == [BROKEN, BROKEN] and problems_in(lambda: None) == []
    with pytest.raises(TypeError):
        problems_in(lambda: len(3))


def test_a_problem_has_fields_and_one_form():
    assert str(BROKEN) == "top_p=1.5 must be at most 1: it is a probability mass. Use 1.0."
    asked = Problem("run", "be known", remedy="Did you mean 'y'?", value="x")
    assert str(asked) == "run='x' must be known. Did you mean 'y'?"


def test_a_problem_is_named_with_the_place_that_contains_it():
    names = {
        BROKEN.within("run.config").name: "run.config.top_p",
        BROKEN.within("row 3 of x.csv").name: "row 3 of x.csv: top_p",
        BROKEN.within("a").within("a").name: "a.top_p",
        BROKEN.within("").name: "top_p",
    }
    assert [*names] == [*names.values()]


def test_an_error_is_the_same_in_another_process():
    error = pickle.loads(pickle.dumps(Problems("m", "be text", "it is empty", "Name one", "")))
    assert type(error) is Problems and error.problem.value == ""
    assert error.within("a").problem.name == "a.m" and error.problem.name == "m"


def test_warnings_are_given_and_errors_raised_at_once_each_rule_of_a_name_once():
    wrong = Problem("lr", "be a number", value="fast")
    with pytest.warns(SettingWarning, match="^top_p=1.5 must be at most 1.$"), pytest.raises(
        Problems
    ) as caught:
        report([wrong, warning("top_p", "be at most 1", value=1.5), wrong, BROKEN.within("a")])
    assert [problem.name for problem in caught.value.found] == ["lr", "a.top_p"]
    assert distinct([wrong, BROKEN, wrong]) == [wrong, BROKEN]


def test_a_network_is_not_printed():
    error = Problem("model", "be text", value=torch.nn.Linear(2, 2).double())
    assert len(str(error)) < 100
    assert shown(torch.nn.Sequential(torch.nn.ReLU())) == "<Sequential>"


def test_an_entry_s_problem_is_moved_with_its_name():
    assert Problem("data.limit").moved("data", "data[2]").name == "data[2].limit"
    assert Problem("data").moved("data", "data[2]").name == "data[2]"
    assert Problem("row 3: text").moved("data", "data[2]").name == "data[2]: row 3: text"
    assert Problem("data[2].path").within("data").name == "data[2].path"
