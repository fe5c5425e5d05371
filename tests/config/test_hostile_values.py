"""Whatever a setting is given, `validate()` takes it or says what is wrong with it."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from rllib_llm.algorithms.generate import GenerateConfig
from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.config.sections import defaults, rllib_table, table
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.setting import IN_CONFIG, IN_ENV
from tests.algorithms import tiny_runs as tiny

VALUES = [
    math.nan, math.inf, -math.inf, -1, -1.0, -3, 0, 1, 1.5, 10**30, 10**400, 1e308, None, True,
    False, "", " ", "\x00", "text", "1e-4", "auto", "os.path", "a.b.c", "../x", b"b", [], [None],
    ["a"], [-1], [math.nan], (), (1, 2), {}, {"a": 1}, {1: 2}, {"model": None}, set(), object(),
    len, np.float32(0.5), np.int64(3), np.int64(-1), np.float64("nan"), np.bool_(True),
    np.array([1, 2]), np.array(1.0), torch.tensor(0.5), torch.tensor([1, 2]), 3 + 4j, range(3),
]  # fmt: skip


def test_an_empty_system_message_switches_it_off():
    row = table(GRPOConfig)["system"]
    assert row.problem("") is None and row.problem(" ").rule == "be more than a blank"


def generate():
    return GenerateConfig().language_model(model=tiny.MODEL)


MADE = {f.__name__: f for f in (
    tiny.grpo, tiny.ppo, tiny.sft, tiny.reward_model, tiny.dpo, generate,
)}  # fmt: skip


def own_rows(algorithm):
    """Rows of the algorithm's config that none before it has: one row is one check."""
    names = list(MADE)
    seen = {id(row) for name in names[: names.index(algorithm)] for row in all_rows(MADE[name])}
    return [row for row in all_rows(MADE[algorithm]) if id(row) not in seen]


def all_rows(make):
    kind = type(make())
    return [*rllib_table(kind).values(), *table(kind).values()]


def with_value(make, row, value):
    config = make()
    if row.place == IN_ENV:
        config.env_config = {**config.env_config, row.name: value}
    else:
        setattr(config, row.attribute or row.name, value)
    return config


def validated(make, row, value):
    """The config, or the error."""
    config = with_value(make, row, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config.validate()
    except Problems as error:
        return error
    return config


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", MADE)
def test_a_value_is_taken_or_refused_by_a_rule(algorithm):
    make = MADE[algorithm]
    for row in own_rows(algorithm):
        for value in VALUES:
            result = validated(make, row, value)
            for each in result.found[:1] if isinstance(result, Problems) else ():
                assert each.name and each.rule, (row.name, value)


@pytest.mark.parametrize("algorithm", [
    pytest.param(name, marks=pytest.mark.slow) if name == "grpo" else name for name in MADE
])  # fmt: skip
def test_nothing_is_taken_that_no_setting_can_mean(algorithm):
    """No number that is not finite, no -1, which RLlib drops, no blank text, but for an empty one
    where the setting says what that means."""
    make = MADE[algorithm]
    never = [math.nan, math.inf, -math.inf, -1, -1.0, 10**400, "", " ", "\x00", 3 + 4j, b"b",
             np.int64(-1), np.float64("nan")]  # fmt: skip
    for row in own_rows(algorithm):
        for value in never:
            if row.may_be_empty and value == "":
                continue
            taken = not isinstance(validated(make, row, value), Problems)
            assert not taken, (row.name, value)


def test_a_whole_number_that_no_tensor_holds_is_refused():
    config = tiny.grpo().sampling(max_new_tokens=2**63)
    with pytest.raises(Problems, match="max_new_tokens=9223372036854775808 must be below 2"):
        config.validate()


@pytest.mark.parametrize("algorithm", MADE)
def test_a_scalar_of_numpy_is_the_number_that_it_holds(algorithm):
    make, kind = MADE[algorithm], type(MADE[algorithm]())
    for row in own_rows(algorithm):
        default = row.value(defaults(kind)) if row.place == IN_CONFIG else row.default
        if type(default) not in (int, float, bool):
            continue
        scalar = np.array(row.value(make()))[()]
        assert isinstance(scalar, np.generic)
        result = validated(make, row, scalar)
        assert not isinstance(result, Problems), (row.name, result)
        if row.place == IN_CONFIG:
            assert type(row.value(result)) in (int, float, bool), row.name
