"""What callbacks log is reported, and what is never called of a class is refused."""

from __future__ import annotations

import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny


class LogsSamples(RLlibCallback):
    """Logs the rows of every batch."""

    def on_sample_end(self, *, env_runner, metrics_logger, samples, **kwargs):
        metrics_logger.log_value("rows", samples[0].num_rows, reduce="sum")
        metrics_logger.log_value("longest", samples[0].num_rows, reduce="max")


def log_rows(*, metrics_logger, samples, **kwargs):
    metrics_logger.log_value("rows", samples[0].num_rows, reduce="sum")


@pytest.mark.parametrize("num_env_runners", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_on_sample_end_logs_is_reported(num_env_runners):
    """12 completions an iteration, and 6 greedy ones in an evaluation of 3 prompts and again."""
    config = tiny.grpo().callbacks(LogsSamples).env_runners(num_env_runners=num_env_runners)
    config.evaluation(evaluation_interval=1, evaluation_duration=3)
    with tiny.built(config) as algorithm:
        for _ in range(2):
            result = algorithm.train()
            assert result["env_runners"]["rows"] == 12
        assert result["evaluation"]["env_runners"]["rows"] == 3


def test_what_a_function_logs_is_reported():
    with tiny.built(tiny.grpo().callbacks(on_sample_end=log_rows)) as algorithm:
        assert algorithm.train()["env_runners"]["rows"] == 12


class OfEpisodes(LogsSamples):
    """Has what nothing calls here."""

    def on_episode_end(self, **kwargs):
        raise AssertionError


@pytest.mark.parametrize("classes", [OfEpisodes, [LogsSamples, OfEpisodes]])
@pytest.mark.parametrize("make", [tiny.ppo, tiny.sft])
def test_methods_of_callbacks_that_nothing_calls_are_refused(make, classes):
    with pytest.raises(Problems) as raised:
        make().callbacks(classes).validate()
    (problem,) = [p for p in raised.value.found if p.severity == "error"]
    assert problem.name == "callbacks" and "on_episode_end" in problem.rule


def test_methods_of_other_stages_are_warned_of():
    with pytest.warns(UserWarning, match="callbacks=.*on_sample_end"):
        tiny.sft().callbacks(LogsSamples).validate()
