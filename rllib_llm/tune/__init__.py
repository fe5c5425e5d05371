"""What a run under Ray Tune gets from us; `default_callbacks()` is what `rllib train` has."""

from __future__ import annotations

import importlib
from typing import Any

# Imported when first used: Tune's loggers cost time to import, and every process imports this.
_PUBLIC = {
    "default_callbacks": "rllib_llm.tune.callbacks",
    "EndBrokenTrials": "rllib_llm.tune.broken_trials",
    "KeepBestCheckpoint": "rllib_llm.tune.best_checkpoint",
    "ResumablePBT": "rllib_llm.tune.resumable_pbt",
    "RestartHungTrials": "rllib_llm.tune.hung_trials",
    "SaveOnStop": "rllib_llm.tune.save_on_stop",
    "TimedCheckpoints": "rllib_llm.tune.timed_checkpoints",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
