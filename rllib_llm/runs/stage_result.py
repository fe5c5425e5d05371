"""The result of a finished stage: the best trial, its model, a record for `--resume`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, make_readable
from rllib_llm.runs.trial_logs import flatten, number, setting
from rllib_llm.runs.yaml_experiments import Experiment
from rllib_llm.shared.storage import Place, UrlPath, local_copy, placed, replace_text, upload

RECORD = "stage.json"
RLLIB_FILES = ("*.pkl", "metadata.json")  # beside the model in a checkpoint
# Which way is up, to mark the best of several trials where the experiment does not say.
BEST = (
    ("objective/scores", "max"),
    ("eval/accuracy", "max"),
    ("eval/loss", "min"),
    ("loss/reward_model", "min"),
    ("loss/sft", "min"),
    ("env_runners/episode_return_mean", "max"),
)


@dataclass
class StageResult:
    """The result of a finished stage. Lists have one entry per trial; `best` is an index."""

    name: str
    algorithm: str
    folder: Place
    trial_folders: list[Place]
    labels: list[str]
    best: int
    model: Place | None
    checkpoint: Place | None
    metrics: dict[str, float]
    stop: dict[str, Any] | None = None  # when its trials were to end; None: not noted

    @property
    def best_trial_folder(self) -> Place:
        """Folder of the trial that `${name.model}` means."""
        return self.trial_folders[self.best]

    def falls_short(self, experiment: Experiment) -> bool:
        """Whether `experiment` asks for more than the stage was to do, and did."""
        same = self.stop is None or self.stop == experiment.stop
        if same or not experiment.stop or experiment.scheduler:
            return False
        done = self.metrics
        return not any(done.get(key, 0.0) >= limit for key, limit in experiment.stop.items())

    def save(self) -> None:
        """Write the record, the mark of a finished stage. Its paths are relative to its folder."""

        def text(value: Any) -> str:
            return str(value.relative_to(self.folder))

        record = dataclasses.asdict(self)
        del record["folder"]
        replace_text(self.folder / RECORD, json.dumps(record, indent=1, default=text))

    @classmethod
    def load(cls, folder: Place) -> StageResult | None:
        """Return the finished stage that lies in `folder`, or None."""
        file = folder / RECORD
        if not file.is_file():
            return None
        record = json.loads(file.read_text(encoding="utf-8"))
        for key in ("model", "checkpoint"):
            record[key] = folder / record[key] if record[key] else None
        record["trial_folders"] = [folder / path for path in record["trial_folders"]]
        return cls(folder=folder, **record)


def collect_result(experiment: Experiment, folder: Place, trials: Sequence[Any]) -> StageResult:
    """Export every trial's model and return the stage's result, with its record written.

    Args:
        trials: `ray.tune.Result` of each trial, all finished.
    """
    flats = [flatten(trial.metrics or {}) for trial in trials]
    best = best_trial(experiment, flats)
    trial_folders = [placed(trial.path, folder) for trial in trials]
    checkpoints = [
        None if trial.checkpoint is None else placed(trial.checkpoint.path, folder)
        for trial in trials
    ]
    models = [export_model(*pair) for pair in zip(checkpoints, trial_folders, strict=True)]
    result = StageResult(
        name=experiment.name,
        algorithm=short_name(experiment.run),
        folder=folder,
        trial_folders=trial_folders,
        labels=trial_labels([trial.config or {} for trial in trials]),
        best=best,
        model=models[best],
        checkpoint=checkpoints[best],
        metrics={k: value for k, v in flats[best].items() if (value := number(v)) is not None},
        stop=dict(experiment.stop),
    )
    result.save()
    return result


def best_trial(experiment: Experiment, flats: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the trial with the best last result, by the experiment's metric."""
    ranking: Sequence[tuple[str, str]] = BEST
    if experiment.metric:
        ranking = [(experiment.metric, experiment.mode or "max")]
    for key, mode in ranking:
        values = {i: number(flat.get(key)) for i, flat in enumerate(flats)}
        known = {i: value for i, value in values.items() if value is not None}
        if known:
            return (max if mode == "max" else min)(known, key=known.__getitem__)
    return 0


def trial_labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each trial: the settings in which the trials differ, else its number."""
    flats = [flatten(config) for config in configs]
    keys = sorted({key for flat in flats for key in flat})
    varied = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    labels = [", ".join(setting(key, flat.get(key)) for key in varied) for flat in flats]
    return [label or f"trial {index + 1}" for index, label in enumerate(labels)]


def short_name(run: str) -> str:
    """Return an algorithm's name without the modules of a dotted path."""
    return run.rpartition(".")[2].rpartition(":")[2]


def export_model(checkpoint: Place | None, trial_folder: Place) -> Place | None:
    """Copy the Hugging Face folder out of `checkpoint` to `<trial_folder>/model`, if it has one,
    without RLlib's files in it; adapters are merged with their base."""
    if checkpoint is None:
        return None
    given = checkpoint / MODEL_IN_CHECKPOINT
    if not (given / "config.json").is_file():
        return None
    source, target = local_copy(given), trial_folder / "model"
    if isinstance(target, UrlPath):
        with tempfile.TemporaryDirectory() as folder:
            _write_model(source, Path(folder) / "model")
            upload(Path(folder) / "model", target)
    else:
        _write_model(source, target)
    return target


def _write_model(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    if (source / "adapter_config.json").is_file():
        from rllib_llm.modules.pretrained import merge_folder  # loads transformers

        merge_folder(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*RLLIB_FILES))
    make_readable(target)
