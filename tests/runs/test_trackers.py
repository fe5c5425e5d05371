from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import yaml
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs import default_callbacks
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.plan import check_experiments
from rllib_llm.runs.results import StageResult
from rllib_llm.runs.trackers import TRACKERS, TrackioLogger, tracker_callbacks, wrong_trackers
from rllib_llm.runs.wandb_logger import WandbLogger
from rllib_llm.shared.errors import Problems
from tests.runs.tiny_trainables import COUNTER


def run(folder: Path, *options: str) -> Path:
    """The trial's folder of a run of two iterations in `folder`, with further options."""
    file = folder / "x.yaml"
    file.write_text(yaml.safe_dump({"a": {"run": COUNTER, "stop": {"training_iteration": 2}}}))
    place = ["--storage-path", str(folder), "--experiment-name", "run"]
    result = CliRunner().invoke(app, ["train", "file", str(file), *place, *options])
    assert result.exit_code == 0, result.output
    return StageResult.load(folder / "run" / "a").best_trial_folder


@pytest.mark.slow  # W&B's own process
def test_wandb_works_offline_without_an_account_and_gets_the_texts(
    tmp_path, ray_session, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trial = run(tmp_path, "--set", "trackers=[wandb]")
    (offline,) = trial.glob("wandb/offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert texts_of(offline) >= {"Say", "number 1", "number 2"}

    run(tmp_path, "--set", "trackers=[wandb]", "--resume", "--stop", "{training_iteration: 3}")
    first, second = sorted(trial.glob("wandb/offline-run-*"))
    # W&B appends what is synced under an id that it knows to the run of that id.
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    assert "number 3" in texts_of(second)


def texts_of(offline: Path) -> set[str]:
    """The texts in the tables of an offline run."""
    tables = sorted(offline.glob("files/media/table/samples_*.json"))
    rows = [row for table in tables for row in json.loads(table.read_text())["data"]]
    return {text for row in rows for text in row if isinstance(text, str)}


@pytest.mark.slow
def test_mlflow_and_trackio_get_every_result(tmp_path, ray_session, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="an optional tracker")
    pytest.importorskip("trackio", reason="an optional tracker")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run(tmp_path, "--set", "trackers=[mlflow, trackio, tensorboard]")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "rllib_llm"]
    (logged,) = client.search_runs([experiment.experiment_id])
    assert (logged.data.tags["run"], logged.data.tags["stage"]) == ("run", "a")
    steps = client.get_metric_history(logged.info.run_id, "training_iteration")
    assert [one.value for one in steps] == [1, 2]
    assert [*(tmp_path / "trackio").rglob("*.db")]


class ScriptedTrackio:
    """Trackio's `init`, `log` and `finish`, which write down how they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def init(self, **settings) -> ScriptedTrackio:
        self.calls.append(("init", settings["project"], settings["group"], settings["name"]))
        return self

    def log(self, numbers: dict, step: int) -> None:
        self.calls.append(("log", numbers, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_trackio_has_a_run_for_each_trial_and_gets_the_numbers(monkeypatch):
    trackio = ScriptedTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    (logger,) = tracker_callbacks(["trackio"], "run", "grpo")
    trial = SimpleNamespace(trial_id="t1", config={"lr": 0.1})
    logger.log_trial_start(trial)
    logger.log_trial_result(1, trial, {"eval": {"scores": 0.5}, "name": "text"})
    logger.log_trial_end(trial)
    assert isinstance(logger, TrackioLogger)
    assert trackio.calls == [
        ("init", "rllib_llm", "run", "run-grpo-t1"), ("log", {"eval/scores": 0.5}, 1), ("finish",)
    ]  # fmt: skip


def found(*trackers: str) -> list[tuple[str, object, str]]:
    return [(one.name, one.value, one.remedy) for one in wrong_trackers(trackers)]


def test_an_unknown_tracker_is_told_with_the_nearest():
    assert found("mlfow") == [("trackers", "mlfow", "Did you mean 'mlflow'?")]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_before_the_run(name, monkeypatch):
    package = TRACKERS[name][0]
    monkeypatch.setitem(sys.modules, package, None)
    assert found(name) == [("trackers", name, f"Install it: pip install {package}")]
    experiment = Experiment("a", COUNTER, stop={"training_iteration": 1}, trackers=[name])
    with pytest.raises(Problems) as error:
        check_experiments([experiment])
    assert [problem.name for problem in error.value.found] == ["a.trackers"]
    with pytest.raises(Problems):
        default_callbacks(trackers=[name])


def test_without_key_login_or_offline_mode_wandb_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    ((name, value, remedy),) = found("wandb")
    assert (name, value) == ("trackers", "wandb")
    assert "WANDB_MODE=offline" in remedy


def test_the_key_is_in_no_file_that_tune_writes(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key")
    assert found("wandb") == []
    # As Tune writes it into tuner.pkl.
    assert b"s3cret-key" not in cloudpickle.dumps(WandbLogger(project="project"))


def test_tensorboard_is_tune_s_own():
    from ray.tune.logger import TBXLoggerCallback

    (logger,) = tracker_callbacks(["tensorboard"], "run", "a")
    assert type(logger) is TBXLoggerCallback
