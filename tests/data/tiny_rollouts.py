"""Rollouts by hand: what a store holds after a few `put`s."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from rllib_llm.data.rollout_store import SCHEMA


def table(*rows: dict[str, Any], **all_rows: Any) -> pa.Table:
    """Rows of the store's columns, those that are not given null."""
    whole = [{**row, **all_rows} for row in rows]
    names = {name for row in whole for name in row}
    return pa.table({
        field.name: pa.array([row.get(field.name) for row in whole], field.type)
        for field in SCHEMA
        if field.name in names
    })  # fmt: skip


def put(store, iteration: int, *rows: dict[str, Any], **all_rows: Any) -> None:
    """Has the store keep the rows."""
    store.put(iteration, len(rows), lambda: table(*rows, **all_rows))


def group(position: int, scores, *, prompt: str = "1+1=", status: str = "trained"):
    """Rows of one group, the completion of each its score as text."""
    return [
        {
            "run": "trial", "status": status, "reason": "", "valid": True, "position": position,
            "group": position, "sample": sample, "row": 0, "prompt": prompt,
            "completion": f" {score:g}",
            "score": score, "reward": score, "tokens": 3, "finish_reason": "stop",
            "rewards": json.dumps({"correct": score}),
        }
        for sample, score in enumerate(scores)
    ]  # fmt: skip
