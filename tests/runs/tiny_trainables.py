"""Trainables that cost nothing: what the command line does with a run, without a language model."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.tune import PlacementGroupFactory, Trainable

# As in rllib_llm, whose import would cost each worker process seconds.
MODEL_IN_CHECKPOINT = Path("learner_group", "learner", "rl_module", "default_policy")
SAMPLES_FILE = "samples.jsonl"
COUNTER = "tests.runs.tiny_trainables.Counter"


@dataclass
class CounterConfig:
    """Settings of `Counter`."""

    model: str | None = None
    lr: float = 0.1
    env_config: dict | None = None
    fail_at: int | None = None
    """Iteration in which it raises, the first time."""
    seconds: float = 0.0
    """That an iteration takes."""
    full_disk: bool = False
    """Whether a checkpoint finds no room."""
    no_room_at: int | None = None
    """Iteration whose checkpoint finds no room, the first time."""
    stale: int = 1
    """Iterations since the held-out result was measured; of 0 the best is saved each time."""
    num_cpus: float = 1

    def update_from_dict(self, settings: Mapping[str, Any]) -> CounterConfig:
        for key, value in settings.items():
            setattr(self, key, value)
        return self

    def validate(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr={self.lr!r} must be at least 0: steps go downhill. Raise it.")


class Counter(Trainable):
    """Counts: iteration i reports a reward of i * lr, and its checkpoint holds a model folder."""

    @classmethod
    def get_default_config(cls) -> CounterConfig:
        return CounterConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        settings = config if isinstance(config, Mapping) else vars(config)
        return PlacementGroupFactory([{"CPU": settings.get("num_cpus", 1)}])

    def setup(self, config: dict[str, Any]) -> None:
        self.settings = CounterConfig().update_from_dict(config)
        self.count = 0
        self.was_restored = False

    def step(self) -> dict[str, Any]:
        time.sleep(self.settings.seconds)
        self.count += 1
        if self.count == self.settings.fail_at and not self.was_restored:
            raise ValueError(f"fail_at={self.count} must not be reached: a test wants it. Stop.")
        self._write_sample()
        return {
            "episode": 10 * self.count,
            "objective": {"scores": self.count * self.settings.lr, "kl": 0.5},
            "eval": {"scores": float(self.count), "iteration": self.count - self.settings.stale},
        }

    def _write_sample(self) -> None:
        row = {
            "iteration": self.count - 1,
            "split": "eval",
            "prompt_index": 7,
            "prompt": "Say",
            "completion": f"number {self.count}",
            "score": float(self.count),
        }
        with (Path(self._storage.trial_fs_path) / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        is_full = self.count == self.settings.no_room_at and not self.was_restored
        if self.settings.full_disk or is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        model = Path(checkpoint_dir) / MODEL_IN_CHECKPOINT
        model.mkdir(parents=True)
        config = {"architectures": ["CounterForCausalLM"], "made_from": self.settings.model}
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (Path(checkpoint_dir) / "count.json").write_text(json.dumps(self.count), encoding="utf-8")

    def load_checkpoint(self, checkpoint: str) -> None:
        self.count = json.loads((Path(checkpoint) / "count.json").read_text(encoding="utf-8"))
        self.was_restored = True
