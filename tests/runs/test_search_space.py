from __future__ import annotations

import pytest
from ray.tune.search.sample import Categorical, Float, Integer

from rllib_llm.runs.search_space import examples, to_tune
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.setting import SAMPLERS


def test_samplers_become_tune_domains_wherever_they_stand():
    space = to_tune(
        {
            "lr": {"loguniform": [1e-6, 1e-4]},
            "seed": {"randint": {"lower": 0, "upper": 9}},
            "env_config": {"device": {"choice": ["cpu", "cuda"]}},
            "plain": {"uniform": 1, "other": 2},  # two keys: an ordinary mapping
        },
        "a.config",
    )
    assert isinstance(space["lr"], Float) and (space["lr"].lower, space["lr"].upper) == (1e-6, 1e-4)
    assert isinstance(space["seed"], Integer) and space["seed"].upper == 9
    assert isinstance(space["env_config"]["device"], Categorical)
    assert space["plain"] == {"uniform": 1, "other": 2}


def test_every_sampler_can_be_written_by_position():
    for name in SAMPLERS:
        numbers = [0.0, 1.0] if name.endswith("randn") else [1, 8]
        domain = to_tune({name: [*numbers, 1] if name.startswith("q") else numbers}, "a")
        assert isinstance(domain.sample(), int | float), name


def test_examples_are_all_points_of_the_grid_with_samplers_drawn():
    space = to_tune({"a": {"grid_search": [1, 2]}, "b": {"uniform": [5, 6]}, "c": 7}, "x")
    points = examples(space)
    assert [point["a"] for point in points] == [1, 2]
    assert all(5 <= point["b"] <= 6 and point["c"] == 7 for point in points)
    assert len(examples({"a": {"grid_search": list(range(100))}}, limit=8)) == 8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"grid_search": 3}, r"a\.grid_search=3 must be a list"),
        ({"choice": []}, r"a\.choice=\[\] must be a list of at least one"),
        ({"uniform": [1]}, r"must give 2 numbers \(lower, upper\)"),
        ({"uniform": {"lower": 1}}, r"must give 2 numbers \(lower, upper\)"),
        ({"uniform": ["x", 2]}, r"a\.uniform\.lower='x' must be a number"),
        ({"loguniform": [0, 1]}, "cannot be sampled"),
        (
            {"loguniform": [1e-3, 1e-5]},
            r"a\.loguniform=.* must give a lower bound that is not",
        ),
    ],
)
def test_wrong_arguments_are_refused(value: dict, message: str):
    with pytest.raises(Problems, match=message):
        to_tune(value, "a")
