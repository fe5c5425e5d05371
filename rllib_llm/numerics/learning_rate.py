"""Schedules of the learning rate, counted in updates."""

from __future__ import annotations

import math

from rllib_llm.shared.errors import Problems, require

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate_factor(
    update: int, *, schedule: str, num_warmup_updates: int, num_total_updates: int | None
) -> float:
    """The factor of the base learning rate at `update` (0 = the first).

    Linear warm-up from 1/(n+1) over `num_warmup_updates`, then constant, or linear or cosine
    decay to 0 at `num_total_updates` (SGDR, Loshchilov & Hutter 2017, eq. 5, without restarts).

    Raises:
        ValueError: unknown schedule, or a decay without `num_total_updates`.
    """
    require(schedule in SCHEDULES, "lr_schedule", schedule, f"be one of {SCHEDULES}")
    if update < num_warmup_updates:
        return (update + 1) / (num_warmup_updates + 1)
    if schedule == "constant":
        return 1.0
    if not num_total_updates:
        rule = f"be the optimiser updates of the whole run with lr_schedule={schedule!r}"
        raise Problems("lr_num_updates", rule, "the decay needs its end", "", num_total_updates)
    span = max(1, num_total_updates - num_warmup_updates)
    progress = min(1.0, (update - num_warmup_updates) / span)
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
