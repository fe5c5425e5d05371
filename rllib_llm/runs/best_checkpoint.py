"""A Tune callback that keeps the best checkpoint of each trial, whichever ones Tune deletes.

A held-out result belongs to the weights that were evaluated, and stands in later results until the
next evaluation. So a trial is asked for a checkpoint with each result that is the best so far, and
a checkpoint counts only with a result that was measured on it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem, FileType, LocalFileSystem, copy_files
from ray.tune import Callback
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_llm.runs.flat_results import flatten, number
from rllib_llm.shared.storage import BestEffort

MEASURED = "eval/iteration"  # after which iteration what stands under eval/ was measured
BEST_CHECKPOINT = "best_checkpoint"
RECORD = "best_checkpoint.json"
# What held-out data says, and which way is up; the first that a result has is taken.
HELD_OUT = (
    ("eval/scores", "max"),
    ("eval/accuracy", "max"),
    ("eval/loss", "min"),
    ("evaluation/env_runners/episode_return_mean", "max"),
)


class KeepBestCheckpoint(Callback):
    """Has `best_checkpoint` in a trial's folder be the checkpoint with the best held-out result,
    and `best_checkpoint.json` say which one that is. It takes no more room than Tune's own as long
    as that is kept: files are linked; at a URL they are copied. Trials without held-out results
    have none.
    """

    def __init__(self, metric: str | None = None, mode: str | None = None):
        """`metric`, `mode`: another result to go by, "max" or "min"."""
        self._rules = HELD_OUT if metric is None else ((metric, mode or "max"),)
        self._best: dict[str, dict[str, Any]] = {}  # by trial id, saved in this start
        self._copy = BestEffort(BEST_CHECKPOINT)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        record = self._record(flatten(result), "")
        if record is not None and _is_better(record, self._best.get(trial.trial_id)):
            result[SHOULD_CHECKPOINT] = True

    def on_checkpoint(
        self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any
    ) -> None:
        record = self._record(flatten(trial.last_result or {}), Path(checkpoint.path).name)
        if record is None:
            return
        # Only now: a trial that dies while it saves is asked again.
        if _is_better(record, self._best.get(trial.trial_id)):
            self._best[trial.trial_id] = record
        with self._copy.writing():
            if isinstance(checkpoint.filesystem, LocalFileSystem):
                _keep_here(Path(checkpoint.path), record)
            else:
                _keep_elsewhere(checkpoint.filesystem, checkpoint.path, record)

    def _record(self, result: Mapping[str, Any], name: str) -> dict[str, Any] | None:
        """What is noted of a checkpoint: the first of the rules' results that was measured in this
        iteration, None where there is none."""
        iteration = result.get("training_iteration")
        for metric, mode in self._rules:
            value = number(result.get(metric))
            measured = result.get(MEASURED, iteration) if metric.startswith("eval/") else iteration
            if value is not None and measured == iteration:
                return {"metric": metric, "mode": mode, "value": value, "checkpoint": name,
                        "training_iteration": iteration}  # fmt: skip
        return None


def _keep_here(source: Path, record: Mapping[str, Any]) -> None:
    folder = source.parent
    target = folder / BEST_CHECKPOINT
    before = _read(folder / RECORD) if target.is_dir() else None
    if source.is_dir() and _is_better(record, before):
        _link(source, target)
        (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _keep_elsewhere(filesystem: FileSystem, source: str, record: Mapping[str, Any]) -> None:
    """As on a disk, where storage is not one: files are copied. The record is written last, so
    that without it there is no best checkpoint."""
    folder = source.rpartition("/")[0]
    target, file = f"{folder}/{BEST_CHECKPOINT}", f"{folder}/{RECORD}"
    before = None
    if filesystem.get_file_info(file).type == FileType.File:
        with filesystem.open_input_stream(file) as stream:
            before = json.loads(stream.read())
    if not _is_better(record, before):
        return
    for path, delete in ((file, filesystem.delete_file), (target, filesystem.delete_dir)):
        if filesystem.get_file_info(path).type != FileType.NotFound:
            delete(path)
    filesystem.create_dir(target, recursive=True)
    copy_files(source, target, filesystem, filesystem)
    with filesystem.open_output_stream(file) as stream:
        stream.write(json.dumps(record, indent=1).encode())


def _is_better(record: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    if before is None or before["metric"] != record["metric"]:
        return True
    gain = record["value"] - before["value"]
    return gain > 0 if record["mode"] == "max" else gain < 0


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _link(source: Path, target: Path) -> None:
    """Makes `target` the same files as `source`, which may be deleted later."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link_or_copy)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.is_dir():
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
