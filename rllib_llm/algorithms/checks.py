"""One form for every complaint about a setting."""

from __future__ import annotations

from typing import Any


def require(condition: bool, name: str, value: Any, rule: str, reason: str, remedy: str) -> None:
    """Raises ValueError "`name`=`value` must be `rule`: `reason`. `remedy`." unless `condition`."""
    if not condition:
        raise ValueError(f"{name}={value!r} must be {rule}: {reason}. {remedy}.")
