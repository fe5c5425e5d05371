"""Runs under Ray Tune; `default_callbacks()` are those of `rllib train`."""

from __future__ import annotations

import importlib
from typing import Any

# Imported when first used: Tune's loggers cost time to import, and every process imports this.
_PUBLIC = {
    "default_callbacks": "rllib_llm.runs.callbacks",
    "EndBrokenTrials": "rllib_llm.runs.callbacks",
    "KeepBestCheckpoint": "rllib_llm.runs.trial_checkpoints",
    "ResumablePBT": "rllib_llm.runs.search_space",
    "RestartHungTrials": "rllib_llm.runs.callbacks",
    "SaveOnStop": "rllib_llm.runs.trial_checkpoints",
    "TimedCheckpoints": "rllib_llm.runs.trial_checkpoints",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
