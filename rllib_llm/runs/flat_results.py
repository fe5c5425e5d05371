"""Results as one level of names joined by "/", and what of them is a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested result with keys joined by '/'."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: Any) -> float | None:
    """Return `value` as a finite float, or None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def setting(key: str, value: Any) -> str:
    """Return "name=value", short: the last part of the key, floats to four digits."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{key.rpartition('/')[2]}={text}"
