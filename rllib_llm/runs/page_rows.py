"""Completions for the report page: from the rollout store where there is one, else from
samples.jsonl, which has no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.data.encoding import TokenTexts
from rllib_llm.rollouts.samples import SAMPLES_FILE
from rllib_llm.runs.trial_logs import read_json_lines

SETTINGS_FILE = "params.json"  # Tune's
ROLLOUTS = "rollouts"  # the store's folder in a trial's
MAX_ROWS = 2000  # on one page; spread over the run
DIGITS = 4
TOKEN_COLUMNS = ("completion_ids", "logprobs", "ref_logprobs", "advantages")
COLUMNS = ("iteration", "status", "prompt", "completion", "score", "rewards", "valid",
           "finish_reason", *TOKEN_COLUMNS)  # fmt: skip
NO_PART = ("iteration", "split", "prompt_index", "prompt", "completion", "score")


def page_rows(trial_folder: Path, limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Rows {iteration, split, prompt, completion, score, parts, tokens} of a trial, `limit` at
    most, spread evenly. tokens: [[text, log-prob, advantage, KL], ...], None where not known; of
    samples without tokens [].
    """
    rows = _stored(trial_folder, limit)
    if rows:
        return rows
    samples = _spread(read_json_lines(trial_folder / SAMPLES_FILE), limit)
    return [_of_sample(row) for row in samples]


def _of_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        name: value
        for name, value in row.items()
        if name not in NO_PART and isinstance(value, int | float)
    }
    return {
        "iteration": row.get("iteration"),
        "split": row.get("split", "train"),
        "prompt": row.get("prompt", ""),
        "completion": row.get("completion", ""),
        "score": row.get("score"),
        "parts": parts,
        "tokens": [],
    }


def _stored(trial_folder: Path, limit: int) -> list[dict[str, Any]]:
    folder = trial_folder / ROLLOUTS
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        return []
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    per_file = max(1, limit // len(files))
    words = _Words(trial_folder)
    for file in _spread(files, limit):
        table = pq.read_table(file, columns=list(COLUMNS))
        rows += [_of_rollout(row, words) for row in _spread(table.to_pylist(), per_file)]
    return rows[:limit]


def _of_rollout(row: Mapping[str, Any], words: _Words) -> dict[str, Any]:
    status = str(row.get("status"))
    return {
        "iteration": row["iteration"],
        "split": {"trained": "train", "evaluated": "eval"}.get(status, status),
        "prompt": row.get("prompt") or "",
        "completion": row.get("completion") or "",
        "score": row.get("score") if row.get("valid", True) else None,
        "parts": json.loads(row.get("rewards") or "{}"),
        "tokens": _tokens(row, words),
    }


def _tokens(row: Mapping[str, Any], words: _Words) -> list[list[Any]]:
    ids = row.get("completion_ids") or []
    logprobs, ref, advantages = (row.get(name) or [] for name in TOKEN_COLUMNS[1:])
    tokens = []
    for index, token in enumerate(ids):
        logprob, reference = _at(logprobs, index), _at(ref, index)
        kl = None if logprob is None or reference is None else logprob - reference
        tokens.append([words.text(token), *map(_rounded, (logprob, _at(advantages, index), kl))])
    return tokens


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _spread(rows: Sequence[Any], limit: int) -> list[Any]:
    """`limit` of the rows, from first to last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


class _Words:
    """What token ids say, by the tokenizer of the trial's model; "#17" where it has none."""

    def __init__(self, trial_folder: Path) -> None:
        tokenizer = _tokenizer(trial_folder)
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    def text(self, token: int) -> str:
        """One token."""
        return f"#{token}" if self._texts is None else self._texts.of(token)[0]


def _tokenizer(trial_folder: Path) -> Any:
    """That of the exported model, else of the newest checkpoint, else of the folder that the run
    began with; None where there is none yet."""
    files = [trial_folder / "model" / "tokenizer_config.json"]
    files += sorted(trial_folder.glob("checkpoint_*/**/tokenizer_config.json"), reverse=True)
    files += [folder / "tokenizer_config.json" for folder in _began_with(trial_folder)]
    for file in files:
        if file.is_file():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(file.parent)
    return None


def _began_with(trial_folder: Path) -> list[Path]:
    """The folder of the model that the trial's settings name, where that is one."""
    try:
        model = json.loads((trial_folder / SETTINGS_FILE).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError):
        return []
    return [Path(model).expanduser()] if isinstance(model, str) else []
