"""A `Tuner` in Python with `default_callbacks()` has what `rllib train` has."""

from __future__ import annotations

import csv
import json

import pytest
from ray import tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.utils.callback import _create_default_callbacks

import rllib_llm
from rllib_llm.runs import default_callbacks
from rllib_llm.runs.results import read_json_lines
from rllib_llm.shared.run_layout import RESULTS
from tests.runs.tiny_trainables import Counter


def test_they_are_public_and_new_each_time():
    assert rllib_llm.default_callbacks is default_callbacks
    first, second = default_callbacks(), default_callbacks()
    assert not {id(one) for one in first} & {id(one) for one in second}
    names = {type(one).__name__ for one in first}
    assert names >= {"ResultLog", "TimedCheckpoints", "RestartHungTrials"}
    untimed = default_callbacks(checkpoint_interval_s=None)
    assert "TimedCheckpoints" not in {type(one).__name__ for one in untimed}


@pytest.mark.slow  # a trial that is started twice
def test_a_tuner_that_restarts_its_trial(tmp_path, ray_session):
    results = tune.Tuner(
        Counter,
        param_space={"fail_at": 4, "stale": 0},
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            stop={"training_iteration": 6},
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            callbacks=default_callbacks(checkpoint_interval_s=0.0),
        ),
    ).fit()
    assert results.num_errors == 0
    (trial,) = (tmp_path / "run").glob("Counter_*")
    rows = [row["training_iteration"] for row in read_json_lines(trial / RESULTS)]
    assert rows == [1, 2, 3, 4, 5, 6]
    assert results[0].metrics_dataframe["training_iteration"].tolist() == rows
    with (trial / "progress.csv").open(encoding="utf-8") as lines:
        assert [int(row["training_iteration"]) for row in csv.DictReader(lines)] == rows
    assert read_json_lines(trial / RESULTS)[3]["iterations_since_restore"] == 1
    assert json.loads((trial / "best_checkpoint" / "count.json").read_text()) == 6


def test_tune_adds_no_writer_of_results():
    """Its own would write rows that are computed anew a second time."""
    callbacks = _create_default_callbacks(default_callbacks(), air_verbosity=None)
    kinds = {type(callback) for callback in callbacks}
    assert not kinds & {JsonLoggerCallback, CSVLoggerCallback}
