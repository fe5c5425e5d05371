"""Mathematical answers, compared by math-verify in processes with hard deadlines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_llm.envs.sandbox import WorkerPool

MISSING = (
    "MathVerify must find the package math-verify: it cannot be imported. Install it: "
    "pip install 'rllib-llm[environments]'."
)


class MathVerify:
    """1 where a completion's answer equals the data set's, mathematically; 0 where it does not.

    In `env_config`: `reward_functions: [rllib_llm.envs.judges.math_verifier.MathVerify]`.
    A comparison that does not end in time, and a right answer that cannot be read, are `Invalid`.

    Args:
        answer_column: of the data set; LaTeX or text. A row whose answer is None is not judged.
        pool: further arguments of `WorkerPool`.

    Raises:
        ImportError: math-verify is not installed.
    """

    wants_texts = True

    def __init__(self, answer_column: str = "answer", **pool: Any) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(MISSING)
        self._answer_column = answer_column
        self._pool = WorkerPool(f"{Path(__file__).with_name('math_check.py')}:check", **pool)

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """1.0 or 0.0 for each completion, `Invalid` where it could not be found out.

        Raises:
            ValueError: the data set has no such column.
        """
        if self._answer_column not in columns:
            raise ValueError(
                f"answer_column={self._answer_column!r} must be a column of the data set, one of "
                f"{sorted(columns)}: it holds the right answers. Correct the name."
            )
        answers = columns[self._answer_column]
        judged = [i for i, answer in enumerate(answers) if answer is not None]
        calls = [{"completion": completions[i], "answer": str(answers[i])} for i in judged]
        scores: list[Any] = [None] * len(completions)
        for i, score in zip(judged, self._pool.map(calls), strict=True):
            scores[i] = score
        return scores
