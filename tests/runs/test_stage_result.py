from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.results import (
    StageResult,
    best_trial,
    collect_result,
    export_model,
    setting,
    trial_labels,
)


def test_the_best_trial_is_told_by_the_experiments_metric_or_the_algorithms():
    flats = [{"objective/scores": 1.0, "x": 1}, {"objective/scores": 3.0, "x": 0}, {"x": 2}]
    assert best_trial(Experiment("a", "PPOPtx"), flats) == 1
    assert best_trial(Experiment("a", "PPOPtx", metric="x"), flats) == 2
    assert best_trial(Experiment("a", "PPOPtx", metric="x", mode="min"), flats) == 1
    assert best_trial(Experiment("a", "SFT"), [{"eval/loss": 2.0}, {"eval/loss": 1.0}]) == 1
    assert best_trial(Experiment("a", "SFT"), [{}, {}]) == 0


@pytest.mark.parametrize(("held_out", "best"), [
    ({"eval/scores": 2.0}, 1), ({"eval/accuracy": 0.6}, 1), ({"eval/loss": 2.0}, 0),
    ({"evaluation/env_runners/episode_return_mean": 2.0}, 1),
])  # fmt: skip
def test_held_out_results_rank_trials_before_training_scores(held_out, best):
    """The first trial scores higher on what it learnt from; held out, `best` does."""
    (name, value), *_ = held_out.items()
    flats = [{"objective/scores": 9.0, name: value / 2}, {"objective/scores": 1.0, name: value}]
    assert best_trial(Experiment("a", "GRPO"), flats) == best
    assert best_trial(Experiment("a", "GRPO", metric="objective/scores"), flats) == 0


def test_trials_are_called_by_what_differs():
    configs = [{"lr": 1e-5, "env_config": {"n": 1}, "x": 0}, {"lr": 1e-3, "env_config": {"n": 1}}]
    assert trial_labels(configs) == ["lr=1e-05, x=0", "lr=0.001, x=None"]
    assert trial_labels([{"a": {"b": 1}}, {"a": {"b": 2}}]) == ["b=1", "b=2"]
    assert trial_labels([{"a": 1}, {"a": 1}]) == ["trial 1", "trial 2"]
    assert setting("env_config/lr", 0.123456) == "lr=0.1235"


def test_a_setting_that_was_drawn_as_by_default_is_told(tmp_path):
    """The config of a result has only what differs from defaults; Tune's file has all that was
    drawn."""
    trials = []
    for index, temperature in enumerate((0.7, 1.0)):
        folder = tmp_path / f"trial{index}"
        folder.mkdir()
        (folder / "params.json").write_text(json.dumps({"temperature": temperature}))
        config = {"temperature": temperature} if temperature != 1.0 else {}
        trials.append(SimpleNamespace(metrics={}, path=str(folder), checkpoint=None, config=config))
    result = collect_result(Experiment("a", "GRPO"), tmp_path, trials)
    assert result.labels == ["temperature=0.7", "temperature=1"]


def test_a_stages_record_comes_back_as_it_was(tmp_path):
    result = StageResult(
        name="sft",
        algorithm="SFT",
        folder=tmp_path,
        trial_folders=[tmp_path / "t"],
        labels=["trial 1"],
        best=0,
        model=tmp_path / "t" / "model",
        checkpoint=None,
        metrics={"loss/sft": 1.5},
    )
    assert StageResult.load(tmp_path) is None
    result.save()
    assert StageResult.load(tmp_path) == result
    assert result.best_trial_folder == Path(tmp_path / "t")


def test_an_exported_model_is_readable_and_holds_nothing_of_rllib(tmp_path):
    source = tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT
    source.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "class_and_ctor_args.pkl", "metadata.json"):
        (source / name).write_text("{}", encoding="utf-8")
    (source / "model.safetensors").chmod(0o600)  # as safetensors writes its files
    (tmp_path / "any").touch()
    model = export_model(tmp_path / "checkpoint", tmp_path)
    assert model == tmp_path / "model"
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
    modes = {path.stat().st_mode for path in model.iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}


def test_a_stage_falls_short_where_more_is_asked_for_than_before():
    stage = StageResult("a", "SFT", Path("a"), [], [], 0, None, None,
                        {"training_iteration": 5.0, "episode": 50.0},
                        stop={"training_iteration": 5})  # fmt: skip

    def more(**stop):
        return stage.falls_short(Experiment("a", "SFT", stop=stop))

    assert more(training_iteration=6) and more(training_iteration=6, episode=51)
    assert not more(training_iteration=5) and not more(training_iteration=4)
    assert not more(training_iteration=6, episode=50) and not more()
    stage.stop = None  # of an older version
    assert not more(training_iteration=6)
