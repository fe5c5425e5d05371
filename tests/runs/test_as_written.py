"""Errors call settings what the file calls them."""

from __future__ import annotations

import pytest

from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.plan import check_experiments
from rllib_llm.shared.errors import Problems

MODEL = "rllib_llm.examples.arithmetic.build_model"
JUDGE = {"functions": ["rllib_llm.examples.arithmetic.correct"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"prompts": {"data": "no.csv"}, "rewards": JUDGE}, "a.config.prompts.data='no.csv' must"),
        ({"prompts": {"data": ["1"], "eval_fraction": 2}}, "a.config.prompts.eval_fraction=2 must"),
        (
            {"prompts": {"data": ["1"]}, "rewards": {"functions": ["x"]}},
            "rewards.functions[0]='x'",
        ),
        ({"prompts": {"data": ["1"]}, "rewards": {"functions": "x"}}, "rewards.functions='x'"),
        ({"prompts": {"data": ["1"], "max_prompt_len": {"grid_serch": [8, 9]}}, "rewards": JUDGE},
         "Did you mean {grid_search: ...}?"),
        ({"prompts": {"data": ["1"]}, "rewards": JUDGE, "lr": {"log_uniform": [1e-5, 1e-4]}},
         "Did you mean {loguniform: ...}?"),
        ({"prompts": {"data": ["1"]}, "rewards": JUDGE, "eval_envs": {"b": {}}},
         "Set evaluation_interval=1, say"),
        (
            {"prompts": {"data": [{"question": "1", "answer": "2"}]}, "rewards": JUDGE},
            "such as `prompts: {column: question}`",
        ),
        (
            {"prompts": {"data": ["1"], "max_prompt_len": 9}, "conversation": {"max_turns": 2},
             "rewards": JUDGE},
            "prompts.max_prompt_len must be a known key. rllib_llm/Conversation-v0, or",
        ),
        (
            {"env": "rllib_llm/Arithmetic-v0", "prompts": {"data": ["1"], "column": "prompt"}},
            "a.config.prompts.column must be a known key. The environment has its own",
        ),
        ({"prompts": {"data": ["1"]}, "rewards": {"weights": [1]}}, "rewards.weights must be"),
        ({"env_config": {"prompts": "no.csv"}, "rewards": JUDGE}, "env_config.prompts='no.csv'"),
        (
            {"prompts": {"data": [{"prompt": "1", "answer": "2"}]}, "rewards": JUDGE,
             "max_new_tokens": 1000},
            "a.config.max_new_tokens=1000 must be at most 63: the longest prompt has 1 tok",
        ),
        (
            {"prompts": {"data": ["1"]}, "rewards": {"model": {"modell": "x"}}},
            "a.config.rewards.model.modell must be a known key. Did you mean",
        ),
        (
            {"prompts": {"data": ["1"]}, "env_config": {"reward_model": {"modell": "x"}}},
            "a.config.env_config.reward_model.modell must be a known key. Did you mean",
        ),
    ],
)  # fmt: skip
def test_settings_are_called_as_the_experiment_has_them(config: dict, said: str):
    experiment = Experiment("a", "GRPO", config.pop("env", None), {"model": MODEL, **config})
    with pytest.raises(Problems) as error:
        check_experiments([experiment])
    assert said in str(error.value)


def test_a_wrong_setting_of_an_evaluation_is_told_once():
    held_out = {"env_config": {"max_prompt_len": "many"}}
    config = {
        "model": MODEL, "env": "rllib_llm/Arithmetic-v0", "max_new_tokens": 8,
        "evaluation_interval": 1, "evaluation_config": held_out,
    }  # fmt: skip
    with pytest.raises(Problems) as error:
        check_experiments([Experiment("a", "GRPO", config.pop("env"), config)])
    (said,) = str(error.value).splitlines()
    assert said.startswith("a.config.evaluation_config.env_config.max_prompt_len='many' must be")
