"""Weights & Biases: results and a table of sampled texts. Imported only where it is on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ray.air.integrations.wandb import WandbLoggerCallback

from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.shared.ray_compat import wandb_logging_actor
from rllib_llm.shared.storage import new_lines

_LoggingActor: Any = wandb_logging_actor()


class SamplesLoggingActor(_LoggingActor):
    """Ray's logging process, which also logs each new evaluation's texts as a table `samples`.

    It works in `trial_folder`, where offline runs stay; Ray's own `logdir` is a temporary folder.
    """

    def __init__(self, logdir: str, *args: Any, trial_folder: str, **kwargs: Any) -> None:
        os.makedirs(trial_folder, exist_ok=True)
        super().__init__(trial_folder, *args, **kwargs)
        self._samples = Path(trial_folder) / SAMPLES_FILE
        self._read_to = 0  # bytes

    def _handle_result(self, result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        log, config = super()._handle_result(result)
        lines, self._read_to = new_lines(self._samples, self._read_to)
        if new := [json.loads(line) for line in lines]:
            names = [*dict.fromkeys(name for row in new for name in row)]
            rows = [[row.get(name) for name in names] for row in new]
            log["samples"] = self._wandb.Table(columns=names, data=rows)
        return log, config


class WandbLogger(WandbLoggerCallback):
    """Ray's W&B callback with the table of sampled texts."""

    _logger_actor_cls = SamplesLoggingActor

    def _start_logging_actor(self, trial: Any, exclude_results: list[str], **kwargs: Any) -> None:
        super()._start_logging_actor(trial, exclude_results, trial_folder=trial.path, **kwargs)
