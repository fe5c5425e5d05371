"""Files of a trial's folder: results (result.json) and sampled texts (samples.jsonl)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem

from rllib_llm.shared.storage import Place


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


RESULTS = "result.json"


def local_folder(trial: Any) -> Path | None:
    """The folder of a trial of Tune, where it lies on a disk of this machine."""
    storage = getattr(trial, "storage", None)
    if storage is None or not isinstance(storage.storage_filesystem, LocalFileSystem):
        return None
    return Path(storage.trial_fs_path)


def read_results(trial_folder: Place) -> list[dict[str, Any]]:
    """Return the flat results of a trial, one per iteration, empty where there are none."""
    return [flatten(row) for row in read_json_lines(trial_folder / RESULTS)]


def read_json_lines(file: Place) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file; a last line that is cut off is left out."""
    if not file.is_file():
        return []
    rows = []
    lines = file.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if index < len(lines) - 1:  # only the last may be unfinished, by a process that died
                raise
    return rows


def read_new_json_lines(file: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a JSON lines file from byte `start` on, and the byte after the last whole
    one. In a file that was cut back meanwhile, rows in place of known ones may be left out."""
    if not file.is_file():
        return [], 0
    start = min(start, file.stat().st_size)
    with file.open("rb") as stream:
        stream.seek(max(0, start - 1))
        text = stream.read()
    begin = text.find(b"\n") + 1 if start else 0  # where a row begins
    end = text.rfind(b"\n") + 1
    rows = [json.loads(line) for line in text[begin:end].splitlines()]
    return rows, max(0, start - 1) + end


def series(results: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points (x, y) of the results that hold both as finite numbers."""
    pairs = [(number(result.get(x)), number(result.get(y))) for result in results]
    points = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in points], [b for _, b in points]


def fresh_series(results: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points at which an evaluation's result is new.

    Results repeat the newest evaluation until the next. `eval/iteration` says when it was made;
    without it, a changed value is new. The evaluation before training stands at x = 0.
    """
    xs, ys = [], []
    seen = None
    for result in results:
        value, at = number(result.get(y)), number(result.get(x))
        made = result.get("eval/iteration", value)
        if value is None or at is None or made == seen:
            continue
        seen = made
        before = result.get("eval/iteration", result["training_iteration"] - 1) == 0
        xs.append(0.0 if before else at)
        ys.append(value)
    return xs, ys


def before_and_after(samples: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Return (first, last) sampled rows of each held-out prompt, in the order of the prompts.

    The first and the last evaluation are compared; a prompt is matched by its index.
    """
    held_out = [row for row in samples if row.get("split") == "eval"]
    iterations = sorted({row["iteration"] for row in held_out})
    if len(iterations) < 2:
        return []
    first = {row["prompt_index"]: row for row in held_out if row["iteration"] == iterations[0]}
    last = {row["prompt_index"]: row for row in held_out if row["iteration"] == iterations[-1]}
    return [(first[index], last[index]) for index in sorted(first.keys() & last.keys())]
