"""Sampled texts on disk: one JSON row per completion in the trial's samples.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.shared import columns
from rllib_llm.shared.storage import BestEffort, keep_json_rows

SAMPLES_FILE = "samples.jsonl"


class SampleLog:
    """Appends rows {iteration, split, prompt_index, prompt, completion, score, <components>,
    <metrics>}. The first it writes replaces rows of that iteration and later ones: of a process
    that went on from the same checkpoint."""

    def __init__(self, folder: Path):
        self.path = folder / SAMPLES_FILE
        self._is_new = True
        self._file = BestEffort(SAMPLES_FILE)

    def write(self, batch: JudgedBatch, *, iteration: int, split: str, limit: int) -> None:
        """Appends the first `limit` rows of `batch`, if its texts were asked for."""
        if not batch.texts:
            return
        rows = [_row(batch, row, iteration, split) for row in range(min(limit, batch.num_rows))]
        with self._file.writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_new:
                keep_json_rows(self.path, "iteration", iteration)
                self._is_new = False
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def _row(batch: JudgedBatch, row: int, iteration: int, split: str) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "split": split,
        "prompt_index": int(batch.columns[columns.PROMPT_INDEX][row]),
        "prompt": batch.texts["prompt"][row],
        "completion": batch.texts["completion"][row],
        "score": round(float(batch.columns[columns.SCORES][row]), 6),
        **{
            name: round(float(column[row]), 6)
            for name, column in {**batch.components, **_told(batch, row)}.items()
            if not column[row].isnan()  # not judged by it, or nobody reported it
        },
    }


def _told(batch: JudgedBatch, row: int) -> dict[str, Any]:
    """The metrics by name; what went wrong only where it did."""
    wrong = (columns.FAILED, columns.PROMPT_TRUNCATED)
    return {
        name: column
        for name, column in batch.metrics.items()
        if column[row] != 0 or not name.endswith(wrong)
    }
