"""Mistakes, the names that may have been meant, all complaints at once."""

from __future__ import annotations

import pickle

import pytest
import torch

from rllib_llm.shared.errors import Problems, all_complaints, complain, noted, shown


def test_complaints_are_raised_unless_all_are_asked_for():
    with pytest.raises(ValueError, match="one"), noted():
        complain(ValueError("one"))
    with all_complaints() as found:
        complain(ValueError("one"))
        with noted():
            raise ValueError("two")
        complain(ValueError("one"))  # again
        raise ValueError("three")
    assert [str(error) for error in found] == ["one", "two", "three"]


def test_consequences_are_dropped_and_bugs_are_not():
    with all_complaints() as found:
        complain(ValueError("one"))
        raise TypeError("its consequence")
    assert len(found) == 1
    with pytest.raises(TypeError), all_complaints():
        raise TypeError("a bug")
    with pytest.raises(ValueError):
        complain(ValueError("outside again"))


BROKEN = Problems(
    name="run.config.top_p", value=1.5, rule="be at most 1", reason="it is a probability mass",
    remedy="Use 1.0",
)  # fmt: skip


def test_an_error_has_fields_and_one_form():
    assert (BROKEN.subject, BROKEN.value, BROKEN.rule) == ("top_p", 1.5, "be at most 1")
    assert str(BROKEN) == (
        "run.config.top_p=1.5 must be at most 1: it is a probability mass. Use 1.0."
    )
    asked = Problems(name="run", value="x", rule="be known", remedy="Did you mean 'y'?")
    assert str(asked) == "run='x' must be known. Did you mean 'y'?"
    assert Problems(name="env_config['prompts']", rule="be set").subject == "prompts"
    assert Problems(name="row 0", rule="be text").at("run.config.data").subject == "data"


def test_an_error_is_the_same_in_another_process_and_place():
    class_of_its_own = pickle.loads(pickle.dumps(Problems("m", "it is empty", "Name one")))
    assert type(class_of_its_own) is Problems and class_of_its_own.value == "m"
    moved = BROKEN.at("row 0").at("data")
    assert (moved.where, moved.rule, BROKEN.where) == ("data: row 0", BROKEN.rule, "")


def test_one_value_is_complained_of_once():
    with all_complaints() as found:
        complain(BROKEN)
        complain(Problems(name=BROKEN.name, value=1.5, rule="be another thing"))
        complain(Problems(name=BROKEN.name, value=2, rule="be at most 1"))
    assert [error.value for error in found] == [1.5, 2]


def test_values_of_settings_whose_names_end_alike_are_two_mistakes():
    values = {"seed": -3, "env_config.seed": -4, "eval_envs.hard.env_config.seed": -5}
    with all_complaints() as found:
        for name, value in values.items():
            complain(Problems(name=name, value=value, rule="be at least 0"))
        for name in ("run.config.seed", "env_config['seed']", "run.config.env_config.seed"):
            complain(Problems(name=name, value=0, rule="be at least 1"))  # its consequence
    assert {error.name: error.value for error in found} == values
    assert BROKEN.setting == ("top_p",)


def test_a_network_is_not_printed():
    error = Problems(name="model", value=torch.nn.Linear(2, 2).double(), rule="be text")
    assert len(str(error)) < 100
    assert shown(torch.nn.Sequential(torch.nn.ReLU())) == "<Sequential>"
