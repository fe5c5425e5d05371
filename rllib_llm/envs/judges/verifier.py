"""A user's function of one completion as a reward function, in contained processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllib_llm.envs.sandbox import WorkerPool


class Verifier:
    """A function of one completion as a reward function, in processes with hard deadlines, without
    network, and with files that it cannot change.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judges.verifier.Verifier,
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
        """What the function returned for each completion, `Invalid` where it did not end well."""
        missing = [name for name in self._columns if name not in columns]
        if missing:
            raise ValueError(
                f"columns={list(self._columns)!r} must be columns of the data set: there is no "
                f"{missing}. Correct the names."
            )
        calls = [
            {"completion": text, **{name: columns[name][i] for name in self._columns}}
            for i, text in enumerate(completions)
        ]
        return self._pool.map(calls)
