"""How long to wait before a call of an actor is repeated."""

from __future__ import annotations

from collections.abc import Callable


def backoff_seconds(attempt: int, uniform: Callable[[float, float], float]) -> float:
    """min(5, 0.05 * 2^attempt) * U(0.5, 1.5): many that failed together do not return together."""
    return min(5.0, 0.05 * 2**attempt) * uniform(0.5, 1.5)
