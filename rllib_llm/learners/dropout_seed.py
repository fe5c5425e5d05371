"""Dropout masks as a function of seed and update count: a run that goes on draws the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seeded_dropout(config: Any, num_updates: int, rank: int) -> Iterator[None]:
    """Seeds torch for one update of one learner, where adapters have dropout; the global random
    state is untouched. All other dropout is off here."""
    if not (config.lora or {}).get("dropout"):
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(((config.seed or 0) * 1_000_003 + num_updates) * 1_009 + rank)
        yield
