"""Files of JSON rows with which another process goes on: what is computed anew is replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path


def keep_json_rows(file: Path, key: str, first: int | None, num_last: int = 0) -> None:
    """Cut from the end of a file of JSON rows a row that is not whole, the last `num_last` ones,
    and the rows whose `key` is `first` or higher back to the nearest lower one; none of these where
    `first` is None."""
    if not file.is_file():
        return
    lines = whole_lines(file)
    del lines[max(0, len(lines) - num_last) :]
    while first is not None and lines and json.loads(lines[-1])[key] >= first:
        lines.pop()
    os.truncate(file, sum(map(len, lines)))


def whole_lines(file: Path) -> list[bytes]:
    """The lines of a file with their ends; not the last one if its writer was killed within it."""
    lines = file.read_bytes().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]
