from __future__ import annotations

import pytest

from rllib_llm.runs.metrics import EPISODES, Metric, columns, progress, summary_metrics
from rllib_llm.runs.results import flatten, number


def test_nested_results_become_flat():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), ("2.5", 2.5), (True, None), (None, None), (float("nan"), None), ("x", None)],
)
def test_numbers_are_finite_floats(value: object, expected: float | None):
    assert number(value) == expected


def test_columns_are_those_of_the_stage_that_results_hold():
    rl = [{"episode": 1}, {"episode": 2, "objective/kl": 0.1, "objective/scores": None}]
    assert [metric.key for metric in columns(rl)] == ["episode", "objective/kl"]
    rm = [{"episode": 1, "loss/reward_model": 0.7, "eval/accuracy": 0.5, "eval/loss": 0.7}]
    assert [metric.title for metric in columns(rm)] == ["episodes", "loss", "held-out accuracy"]
    stock = [{"env_runners/episode_return_mean": 3.0, "num_env_steps_sampled_lifetime": 5}]
    assert [metric.title for metric in columns(stock)] == ["env steps", "return"]
    assert columns([{}]) == []


def test_a_summary_of_ours_leaves_out_what_is_rllibs():
    result = {"episode": 1, "env_runners/episode_return_mean": 3.0, "eval/scores": 1.0}
    assert [metric.key for metric in summary_metrics([result])] == ["episode", "eval/scores"]


def test_completions_without_a_score_are_shown_where_there_are_any():
    results = [{"episode": 1, "train/num_invalid": 0.0}, {"episode": 2, "train/num_invalid": 0.0}]
    assert [metric.key for metric in summary_metrics(results)] == ["episode"]
    results[0]["train/num_invalid"] = 4.0
    assert [metric.key for metric in summary_metrics(results)] == ["episode", "train/num_invalid"]


def test_conversations_that_a_limit_ended_are_shown_where_there_are_any():
    results = [{"episode": 1, "env/truncated": 0.0}]
    assert [metric.key for metric in summary_metrics(results)] == ["episode"]
    results[0]["env/truncated"] = 0.5
    assert [metric.key for metric in summary_metrics(results)] == ["episode", "env/truncated"]


def test_what_rounds_to_zero_has_no_sign():
    metric = Metric("objective/kl", "KL")
    shown = [metric.text(value) for value in (-1e-9, 1e-9, -0.0004, -0.0006, -12.5)]
    assert shown == ["0.000", "0.000", "0.000", "-0.001", "-12.500"]
    assert EPISODES.text(1e6) == "1,000,000"


def test_progress_is_that_of_the_nearest_counter():
    result = {"training_iteration": 5, "episode": 90, "objective/scores": 0.9}
    assert progress(result, {"training_iteration": 10, "episode": 100}) == 0.9
    assert progress(result, {"training_iteration": 4}) == 1.0
    assert progress(result, {"objective/scores": 1.0}) == 0.0  # a goal, not a counter
    assert progress({"epoch": 1.5}, {"epoch": 3}) == 0.5
    assert progress({"env/num_turns": 2}, {"env/num_turns": 4}) == 0.0
    assert progress({"a/num_env_steps_lifetime": 2}, {"a/num_env_steps_lifetime": 4}) == 0.5
    assert progress(result, {"absent": 3}) == progress(result, {}) == 0.0


def test_a_summary_has_reward_parts_drift_and_rows_that_were_lost():
    result = {
        "episode": 1,
        "objective/scores": 1.0,
        "train/correct_rewards": 0.5,
        "train/format_rewards": 0.1,
        "env/reward_model/drift/rank_corr": 0.99,
        "env/reference/drift/kl": 0.004,
        "env/correct_failed": 0.25,
        "env/format_failed": 0.0,
        "train/truncated_share": 0.125,
    }
    titles = [metric.title for metric in summary_metrics([result])]
    assert titles == [
        "episodes",
        "reward",
        "  correct",
        "  format",
        "drift of reference, kl",
        "drift of reward_model, rank_corr",
        "share on which correct failed",
        "share of prompts that were cut",
    ]
    alone = {"episode": 1, "objective/scores": 1.0, "train/reward_model_rewards": 1.0}
    assert [metric.title for metric in summary_metrics([alone])] == ["episodes", "reward"]
