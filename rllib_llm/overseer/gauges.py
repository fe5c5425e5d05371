"""A trial's numbers among Ray's own metrics, which Prometheus collects from each node."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge


class Gauges:
    """Iterations of a part, and the shares of its time."""

    def __init__(self, part: str) -> None:
        tags = {"part": part}
        self._iteration = Gauge(
            "rllib_llm_iteration", "Iterations that a trial has learnt.", tag_keys=("part",)
        )
        self._iteration.set_default_tags(tags)
        self._share = Gauge(
            "rllib_llm_time_share", "Share of a trial's time.", tag_keys=("part", "phase")
        )
        self._share.set_default_tags(tags)

    def set(self, iteration: int, shares: Mapping[str, float]) -> None:
        """The values as they are now."""
        self._iteration.set(iteration)
        for phase, share in shares.items():
            self._share.set(share, tags={"phase": phase})
