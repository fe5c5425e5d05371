"""Settings of groups that stream, checked before anything starts."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.checks import require
from rllib_llm.rollouts.filters import Filters


def check_streaming(config: Any) -> None:
    """Raises ValueError for a stream that cannot be, or whose data is not corrected for."""
    Filters(config.filters or ())
    require(
        config.window == 1 or config.schedule == "free" or not config.streams,
        "window", config.window, "1 with schedule='lockstep'",
        "which group overtakes another would depend on time", "Set schedule='free'",
    )  # fmt: skip
    require(
        config.on_stale == "train" or config.schedule == "free" or not config.streams,
        "on_stale", config.on_stale, "'train' with schedule='lockstep'",
        "no group overtakes another, so none gets too old", "Set schedule='free'",
    )  # fmt: skip
    if not config.makes_stale:
        return
    require(
        config.weights_transport == "store", "weights_transport", config.weights_transport,
        "'store' where samplers are ahead of the learner",
        "older weights have to stay where they are", "Leave it out",
    )  # fmt: skip
