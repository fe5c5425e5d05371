from __future__ import annotations

import pytest

from rllib_llm.runs.yaml_loader import apply_overrides
from rllib_llm.shared.errors import Problems

DATA = {
    "vars": {"data": None},
    "sft": {"run": "SFT", "config": {"lr": 1.0, "data": {"path": "p", "limit": 1}}},
    "ppo": {"run": "PPOPtx", "config": {"env_config": {"reward_functions": [{"weight": 1.0}]}}},
}


def changed(*overrides: str) -> dict:
    return apply_overrides(DATA, overrides, "x.yaml")


def test_one_experiment_with_and_without_config_in_the_path():
    assert changed("sft.config.lr=1e-3")["sft"]["config"]["lr"] == 1e-3
    assert changed("sft.lr=1e-3")["sft"]["config"]["lr"] == 1e-3
    assert "lr" not in changed("sft.lr=1e-3")["ppo"]["config"]
    assert DATA["sft"]["config"]["lr"] == 1.0  # the original is left alone


def test_every_experiment_where_none_is_named():
    data = changed("stop.episode=100", "num_samples=2")
    assert [data[name]["stop"] for name in ("sft", "ppo")] == [{"episode": 100}] * 2
    assert [data[name]["num_samples"] for name in ("sft", "ppo")] == [2, 2]


def test_a_setting_goes_to_the_algorithms_that_know_it():
    both = changed("lr=2")
    assert [both[name]["config"]["lr"] for name in ("sft", "ppo")] == [2, 2]
    one = changed("ptx_coeff=0.5")
    assert one["ppo"]["config"]["ptx_coeff"] == 0.5
    assert "ptx_coeff" not in one["sft"]["config"]


def test_nested_keys_lists_and_variables():
    assert changed("sft.data.limit=5")["sft"]["config"]["data"] == {"path": "p", "limit": 5}
    weights = changed("ppo.env_config.reward_functions.0.weight=3")["ppo"]["config"]["env_config"]
    assert weights["reward_functions"] == [{"weight": 3}]
    assert changed("vars.data=f.jsonl")["vars"] == {"data": "f.jsonl"}
    assert changed("ppo.evaluation_config.explore=true")["ppo"]["config"]["evaluation_config"] == {
        "explore": True
    }


def test_values_are_yaml_with_search_spaces():
    space = changed("sft.lr={grid_search: [1e-5, 1e-4]}")["sft"]["config"]["lr"]
    assert space == {"grid_search": [1e-5, 1e-4]}
    assert changed("sft.data=a=b")["sft"]["config"]["data"] == "a=b"  # only the first "=" counts


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr", "must be KEY=VALUE"),
        ("sft..lr=1", "must be KEY=VALUE"),
        ("ptx_coef=1", "Did you mean 'ptx_coeff'"),
        ("sftt.lr=1", "Did you mean 'sft'"),
        ("eval_fraction=0.1", "Did you mean 'prompts.eval_fraction'"),  # not 'evaluation'
        ("reward_functions=x", "Did you mean 'env_config.reward_functions'"),  # as the file has it
        ("sft=1", "must name a setting of the experiment. Write --set sft.lr=1e-3"),
        ("qqqqqq=1", "Write --set sft.lr=1e-3; `rllib config"),
        ("vars.date=1", "must name a variable of x.yaml: it has data"),
        ("sft.lr.x=1", "must name a setting: config.lr is 1.0"),
        ("ppo.env_config.reward_functions.1.weight=3", "1 must be a number from 0 to 0"),
    ],
)
def test_what_fits_nothing_is_refused(override: str, message: str):
    with pytest.raises(Problems) as error:
        changed(override)
    assert message in str(error.value)


def test_a_setting_inside_a_section_is_found_by_its_name():
    data = {"a": {"run": "PPOPtx", "config": {"training": {"lr": 1.0}, "temperature": 1.0}}}
    changed = apply_overrides(data, ("lr=2", "temperature=3", "sampling.top_k=4"), "x.yaml")
    assert changed["a"]["config"] == {
        "training": {"lr": 2}, "temperature": 3, "sampling": {"top_k": 4},
    }  # fmt: skip
