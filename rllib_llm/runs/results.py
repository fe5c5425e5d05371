"""Results as files: of a trial (result.json, samples.jsonl), and of a finished stage (stage.json):
its best trial and that trial's model, for later stages and `--resume`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, make_readable
from rllib_llm.runs.experiments import Experiment
from rllib_llm.shared.errors import require
from rllib_llm.shared.run_layout import MODEL_CARD, RESULTS, SETTINGS_FILE, STAGE_RECORD
from rllib_llm.shared.storage import (
    Place,
    UrlPath,
    local_copy,
    place_in,
    placed,
    read_json,
    replace_text,
    upload,
)


def flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested result with keys joined by '/'."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: Any) -> float | None:
    """Return `value` as a finite float, or None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def older_evaluation(result: Mapping[str, Any], key: str) -> float | None:
    """Return the iteration whose evaluation gave the held-out result `key`, where others followed
    it; else None."""
    made = number(result.get("eval/iteration"))
    if made is None or not key.startswith("eval/"):
        return None
    return made if made < result.get("training_iteration", 0) else None


def setting(key: str, value: Any) -> str:
    """Return "name=value", short: the last part of the key, floats to four digits."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{key.rpartition('/')[2]}={text}"


def local_folder(trial: Any) -> Path | None:
    """The folder in which the process of a trial of Tune writes, where it runs on this machine: the
    trial's own, or what Tune uploads to that from time to time."""
    if (storage := getattr(trial, "storage", None)) is None:
        return None
    folder = place_in(storage.storage_filesystem, storage.trial_fs_path)
    return folder if isinstance(folder, Path) else Path(storage.trial_working_directory)


def other_trials_checkpoint(trial: Any) -> Path | None:
    """The checkpoint of another trial of the run from which `trial` continues, if any."""
    if trial.checkpoint is None:
        return None
    own, path = Path(trial.storage.trial_fs_path), Path(trial.checkpoint.path)
    return path if path.parent != own and path.parent.parent == own.parent else None


def read_results(trial_folder: Place) -> list[dict[str, Any]]:
    """Return the flat results of a trial, one per iteration, empty where there are none."""
    return [flatten(row) for row in read_json_lines(trial_folder / RESULTS)]


# Shares of pairs that are ordered rightly, and what is 0 where all pairs tie.
MARGINS = {"train/accuracy": "rewards/margins", "eval/accuracy": "eval/rewards/margins"}


def as_shown(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a flat result without the accuracy of pairs that all tie: before the first step of DPO
    there is no order, and 0 (as TRL has it too) would look like a fault."""
    ties = {key for key, margin in MARGINS.items() if flat.get(margin) == 0.0}
    return {key: value for key, value in flat.items() if key not in ties}


def read_json_lines(file: Place) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file; a last line that is cut off is left out."""
    if not file.is_file():
        return []
    *lines, last = file.read_text(encoding="utf-8").splitlines() or [""]
    rows = [json.loads(line) for line in lines]
    with contextlib.suppress(json.JSONDecodeError):  # unfinished, by a process that died
        rows.append(json.loads(last))
    require(all(isinstance(row, dict) for row in rows), str(file), ..., "have an object in a line")
    return rows


def series(results: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points (x, y) of the results that hold both as finite numbers."""
    pairs = [(number(result.get(x)), number(result.get(y))) for result in results]
    points = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in points], [b for _, b in points]


def fresh_series(results: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points at which an evaluation's result is new.

    Results repeat the newest evaluation until the next. `eval/iteration` says when it was made;
    without it, a changed value is new. The evaluation before training stands at x = 0.
    """
    xs, ys, seen = [], [], None
    for result in results:
        value, at = number(result.get(y)), number(result.get(x))
        made = result.get("eval/iteration", value)
        if value is not None and at is not None and made != seen:
            seen = made
            before = result.get("eval/iteration", result["training_iteration"] - 1) == 0
            xs.append(0.0 if before else at)
            ys.append(value)
    return xs, ys


def before_and_after(samples: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Return (first, last) sampled rows of each held-out prompt, in the order of the prompts.

    The first and the last evaluation are compared; a prompt is matched by its environment's name,
    where there are several, and its index.
    """
    held_out = [row for row in samples if row.get("split") == "eval"]
    iterations = sorted({row["iteration"] for row in held_out})
    if len(iterations) < 2:
        return []
    first, last = (
        {(row.get("env", ""), row["prompt_index"]): row
         for row in held_out if row["iteration"] == iteration}
        for iteration in (iterations[0], iterations[-1])
    )  # fmt: skip
    return [(first[prompt], last[prompt]) for prompt in sorted(first.keys() & last.keys())]


RLLIB_FILES = ("*.pkl", "metadata.json")  # beside the model in a checkpoint
# Which way is up, where the experiment does not say; the first that a result has is taken. By
# held-out data the best checkpoint of a trial is told, and the best of several trials as well:
# training scores are of prompts that were learnt from.
HELD_OUT = (
    ("eval/scores", "max"), ("eval/accuracy", "max"), ("eval/loss", "min"),
    ("evaluation/env_runners/episode_return_mean", "max"),
)  # fmt: skip
BEST = (
    *HELD_OUT, ("objective/scores", "max"), ("loss/reward_model", "min"), ("loss/dpo", "min"),
    ("loss/sft", "min"), ("env_runners/episode_return_mean", "max"),
)  # fmt: skip


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
        return not is_reached(experiment.stop, self.metrics)

    def save(self) -> None:
        """Write the record, the mark of a finished stage. Its paths are relative to its folder."""

        def text(value: Any) -> str:
            return str(value.relative_to(self.folder))

        record = dataclasses.asdict(self)
        del record["folder"]
        replace_text(self.folder / STAGE_RECORD, json.dumps(record, indent=1, default=text))

    @classmethod
    def load(cls, folder: Place) -> StageResult | None:
        """Return the finished stage that lies in `folder`, or None."""
        file = folder / STAGE_RECORD
        if not file.is_file():
            return None
        record = json.loads(file.read_text(encoding="utf-8"))
        for key in ("model", "checkpoint"):
            record[key] = folder / record[key] if record[key] else None
        record["trial_folders"] = [folder / path for path in record["trial_folders"]]
        return cls(folder=folder, **record)


def is_reached(stop: Mapping[str, Any], flat: Mapping[str, Any]) -> bool:
    """Whether a trial with this flat result is at its end."""
    values = {key: number(flat.get(key)) for key in stop}
    return any(value is not None and value >= stop[key] for key, value in values.items())


def collect_result(experiment: Experiment, folder: Place, trials: Sequence[Any]) -> StageResult:
    """Export every trial's model and return the stage's result, with its record written.

    Args:
        trials: `ray.tune.Result` of each trial, all finished.
    """
    flats = [flatten(trial.metrics or {}) for trial in trials]
    best = best_trial(experiment, flats)
    trial_folders = [placed(trial.path, folder) for trial in trials]
    checkpoints = [trial.checkpoint and placed(trial.checkpoint.path, folder) for trial in trials]
    models = [export_model(*pair) for pair in zip(checkpoints, trial_folders, strict=True)]
    # A result's config leaves out what is as by default.
    configs = [read_json(folder / SETTINGS_FILE) or trial.config or {}
               for trial, folder in zip(trials, trial_folders, strict=True)]  # fmt: skip
    result = StageResult(
        name=experiment.name, algorithm=short_name(experiment.run), folder=folder,
        trial_folders=trial_folders, labels=trial_labels(configs), best=best,
        model=models[best], checkpoint=checkpoints[best], stop=dict(experiment.stop),
        metrics={k: value for k, v in flats[best].items() if (value := number(v)) is not None},
    )  # fmt: skip
    result.save()
    return result


def best_trial(experiment: Experiment, flats: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the trial with the best last result: by the experiment's metric, else by
    the first of `BEST` that a trial has."""
    given = [(experiment.metric, experiment.mode or "max")] if experiment.metric else BEST
    for key, mode in given:
        known = {i: v for i, flat in enumerate(flats) if (v := number(flat.get(key))) is not None}
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
    """Copy the Hugging Face folder out of `checkpoint` to `<trial_folder>/model`, if it has one."""
    if checkpoint is None:
        return None
    given = checkpoint / MODEL_IN_CHECKPOINT
    if not (given / "config.json").is_file():
        return None
    source, target = local_copy(given), trial_folder / "model"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model" if isinstance(target, UrlPath) else target
        shutil.rmtree(made, ignore_errors=True)
        copy_model(source, made)
        if isinstance(target, UrlPath):
            upload(made, target)
    return target


def copy_model(source: Path, made: Path) -> None:
    """Copy a Hugging Face folder without RLlib's files; adapters are merged with their base. With
    that of a checkpoint, which has no card, goes the card of its trial."""
    if (source / "adapter_config.json").is_file():
        from rllib_llm.modules.pretrained import merge_folder  # loads transformers

        merge_folder(source, made)
    else:
        ignored = shutil.ignore_patterns(*RLLIB_FILES)
        shutil.copytree(source, made, ignore=ignored, dirs_exist_ok=True)
    num = len(MODEL_IN_CHECKPOINT.parts)
    if source.parts[-num:] == MODEL_IN_CHECKPOINT.parts:
        card = source.absolute().parents[num - 1].parent / "model" / MODEL_CARD
        if card.is_file():
            shutil.copy(card, made)
    make_readable(made)
