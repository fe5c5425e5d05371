"""Experiment trackers, by name: callbacks of Tune, Ray's own where Ray has one.

Each reads its account and address from its own environment variables (`WANDB_API_KEY`,
`WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`, ...), so that no file holds a secret.
A package is imported only where its tracker is on.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.tune.logger import LoggerCallback, TBXLoggerCallback

from rllib_llm.runs.results import flatten
from rllib_llm.shared.errors import Problem, closest
from rllib_llm.shared.ray_compat import set_wandb_key

DEFAULT_PROJECT = "rllib_llm"


def wrong_trackers(names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each tracker that is unknown, not installed, or lacks its key."""
    for name in names:
        if name not in TRACKERS:
            known = {one: one for one in TRACKERS}
            yield Problem("trackers", "name known trackers", "", closest(name, known), name)
        elif importlib.util.find_spec(package := TRACKERS[name][0]) is None:
            yield Problem("trackers", f"find the package {package}", "it is not installed",
                          f"Install it: pip install {package}", name)  # fmt: skip
        elif name == "wandb":
            try:
                set_wandb_key(None)
            except ValueError:
                yield Problem(
                    "trackers", "find an API key of Weights & Biases", "", "Set WANDB_API_KEY, run "
                    "`wandb login`, or set WANDB_MODE=offline", name,
                )  # fmt: skip


def tracker_callbacks(names: Sequence[str], run: str, stage: str) -> list[Any]:
    """Returns a new callback for each tracker; `run` and `stage` are the names to be shown."""
    return [TRACKERS[name][1](run, stage) for name in names]


def _wandb(run: str, stage: str) -> Any:
    from rllib_llm.runs.wandb_logger import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")
    # A trial that is started again goes on in the W&B run of its id; the key stays in the
    # environment, since Tune writes its callbacks into a file that others can read.
    project = os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)
    return WandbLogger(project=project, group=run, name=f"{run}-{stage}", resume="allow")


def _mlflow(run: str, stage: str) -> Any:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    return MLflowLoggerCallback(
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT),
        tags={"run": run, "stage": stage},
    )


class TrackioLogger(LoggerCallback):
    """Trackio, Hugging Face's tracker: a run of it for each trial, in a group for each `run`."""

    def __init__(self, run: str, stage: str) -> None:
        self._names = run, stage
        self._runs: dict[str, Any] = {}  # by the trials' ids

    def log_trial_start(self, trial: Any) -> None:
        import trackio

        run, stage = self._names
        self._runs[trial.trial_id] = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT), group=run,
            name=f"{run}-{stage}-{trial.trial_id}", resume="allow", embed=False,
            config=json.loads(json.dumps(trial.config, default=str)),
        )  # fmt: skip

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        numbers = {k: v for k, v in flatten(result).items() if isinstance(v, int | float)}
        self._runs[trial.trial_id].log(numbers, step=iteration)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._runs.pop(trial.trial_id).finish()


TRACKERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # package, callback of run and stage
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
    "tensorboard": ("tensorboardX", lambda run, stage: TBXLoggerCallback()),
    "trackio": ("trackio", TrackioLogger),
}
