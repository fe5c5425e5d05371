"""Functions of one completion as reward functions, in contained processes with hard deadlines: a
user's own, and math-verify's comparison of mathematical answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_llm.envs.judges.reward_functions import Judge, required_column
from rllib_llm.envs.sandbox import WorkerPool


class Verifier(Judge):
    """A function of one completion as a reward function, in processes with hard deadlines, without
    network, and with files that it cannot change.

    In `rewards`: `functions: [{function: rllib_llm.envs.judges.verifier.Verifier,
    kwargs: {function: "my_checks:right", columns: [answer]}}]`, where `right(completion, answer)`
    returns a number, or None where it does not judge.

    Args:
        function: "module:name" or "file.py:name".
        columns: of the data set, which it gets by name beside `completion`.
        pool: further arguments of `WorkerPool`, among them what it may use: `network: true`,
            `environment: [HF_HOME]`, `writable: [cache]`.
    """

    wants_texts = True

    def __init__(self, function: str, columns: Sequence[str] = (), **pool: Any) -> None:
        self._pool = WorkerPool(function, **pool)
        self._columns = tuple(columns)

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """The function's result for each completion; `Invalid` if it failed or timed out."""
        given = {name: required_column(columns, "columns", name) for name in self._columns}
        return self._pool.map(
            [
                {"completion": text, **{name: values[i] for name, values in given.items()}}
                for i, text in enumerate(completions)
            ]
        )


MISSING = (
    "MathVerify must find the package math-verify: it cannot be imported. Install it: "
    "pip install 'rllib-llm[environments]'."
)


class MathVerify(Verifier):
    """1 where a completion's answer equals the data set's, mathematically; 0 where it does not.

    In `rewards`: `functions: [rllib_llm.envs.judges.verifier.MathVerify]`.
    A comparison that does not end in time, and a right answer that cannot be read, are `Invalid`.

    Args:
        answer_column: of the data set; LaTeX or text. A row whose answer is None is not judged.
        pool: further arguments of `WorkerPool`.

    Raises:
        ImportError: math-verify is not installed.
    """

    def __init__(self, answer_column: str = "answer", **pool: Any) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(MISSING)
        super().__init__(f"{Path(__file__).with_name('math_check.py')}:check", **pool)
        self._answer_column = answer_column

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """1.0 or 0.0 for each completion, `Invalid` where it could not be found out.

        Raises:
            ValueError: the data set has no such column.
        """
        answers = required_column(columns, "answer_column", self._answer_column)
        judged = [i for i, answer in enumerate(answers) if answer is not None]
        calls = [{"completion": completions[i], "answer": str(answers[i])} for i in judged]
        scores: list[Any] = [None] * len(completions)
        for i, score in zip(judged, self._pool.map(calls), strict=True):
            scores[i] = score
        return scores
