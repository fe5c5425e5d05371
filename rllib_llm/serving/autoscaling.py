"""How many replicas there should be, for Ray Serve's autoscaler.

A request may ask for many completions, and each takes a place in a replica's batch: what counts is
completions, those that run and those that wait, not requests.
"""

from __future__ import annotations

from typing import Any

COMPLETIONS = "completions"
POLICY = f"{__name__}:by_completions"


def by_completions(context: Any) -> tuple[float, dict[str, Any]]:
    """The replicas that the completions of all need, at `target_ongoing_requests` for each.

    Args:
        context: Ray Serve's `AutoscalingContext`.
    """
    found = context.aggregated_metrics.get(COMPLETIONS, {})
    return sum(found.values()) / context.config.target_ongoing_requests, {}
