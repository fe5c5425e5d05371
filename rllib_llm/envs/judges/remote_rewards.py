"""Reward functions outside of this process: on a service (OpenRLHF's shape, slime's, or that of
`rllib reward-server`), or in contained processes with hard deadlines (a user's own functions, and
math-verify's comparison of mathematical answers).

    openrlhf  POST {"query": [...], "prompts": [...], "labels": [...]} -> {"rewards": [...]}
    slime     POST {"prompt", "response", "label"} -> a number, or an object with one; row by row
    rllib     POST {"prompts": [...], "completions": [...], "columns": {name: [...]}}
              -> {"scores": [... or null], "reasons": [...], "components": {...}}

At most `max_concurrency` requests are under way, and what fails is asked again after growing,
jittered pauses, so that a service which starts again is not run over. What it does not answer is
`Invalid`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rllib_llm.conversations.json_values import as_json
from rllib_llm.envs.judges.reward_functions import Invalid, Judge, required_column
from rllib_llm.envs.sandbox import WorkerPool
from rllib_llm.shared.arguments import Count, Pause, checked
from rllib_llm.shared.openai_client import (
    JUDGE_OUTAGE_S,
    OpenAIClient,
    RequestRefusedError,
    ServerError,
)

TOKEN_ENV = "RLLIB_REWARD_TOKEN"
_NOT_SENT = ("completion_ids", "trainer_state")
_OBJECTS = ("conversations", "environments")  # of conversations; of a data set they are values


@checked
class RemoteReward(Judge):
    """A reward function that a service computes.

    Args:
        url: whole, path included.
        shape: "openrlhf", "slime" or "rllib".
        label_column: of the data set, sent as label where it is there.
        reward_key: of slime's answer, where it is an object.
        batch_size: completions of a request, of "openrlhf" and "rllib".
        token_env: environment variable that holds the bearer token; without it none is sent.
        judge_outage_s: seconds that the service may be away before this gives up.
        client: further arguments of `OpenAIClient`.

    Raises:
        Problems: a wrong value.
    """

    wants_texts = True

    def __init__(
        self, url: str, *, shape: Literal["openrlhf", "slime", "rllib"] = "rllib",
        label_column: str = "answer", reward_key: str = "score", batch_size: Count = 32,
        token_env: str = TOKEN_ENV, max_concurrency: Count = 8,
        judge_outage_s: Pause = JUDGE_OUTAGE_S, **client: Any,
    ) -> None:  # fmt: skip
        base, _, self._path = url.rpartition("/")
        self._client = OpenAIClient(
            base, api_key_env=token_env, max_concurrency=max_concurrency,
            outage_s=judge_outage_s, outage_setting="judge_outage_s", **client,
        )  # fmt: skip
        self._shape, self._label_column, self._reward_key = shape, label_column, reward_key
        self._batch_size = 1 if shape == "slime" else batch_size
        self._num_retried = 0

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | Invalid]:
        """The score of each completion, `Invalid` where the service gave none."""
        before = self._client.num_retries
        sent = {name: values for name, values in columns.items() if name not in _NOT_SENT and (
            name not in _OBJECTS or all(isinstance(v, (str, list, dict)) for v in values)
        )}  # fmt: skip
        starts = range(0, len(completions), self._batch_size)
        parts = [slice(start, start + self._batch_size) for start in starts]
        held = [{name: as_json(values[part]) for name, values in sent.items()} for part in parts]
        asked = zip(parts, held, strict=True)
        answers = await asyncio.gather(
            *(self._ask(prompts[part], completions[part], row) for part, row in asked)
        )
        self._num_retried = self._client.num_retries - before
        return [score for answer in answers for score in answer]

    def metrics(self) -> dict[str, float]:
        """requests_retried: how often the service was asked again in the last call."""
        return {"requests_retried": float(self._num_retried)}

    async def _ask(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[float | Invalid]:
        size = len(completions)

        def read(answer: Any) -> list[float | Invalid]:  # what it raises leads to a retry
            if self._shape == "slime":
                found = answer[self._reward_key] if isinstance(answer, Mapping) else answer
                return [_score(found, "")]
            scores = answer["rewards" if self._shape == "openrlhf" else "scores"]
            if not isinstance(scores, list):
                raise TypeError(f"scores must be a list, not {type(scores).__name__}")
            if len(scores) != size:
                raise ValueError(f"{len(scores)} scores for {size} completions")
            reasons = answer.get("reasons") or [""] * size
            return [_score(*row) for row in zip(scores, reasons, strict=True)]

        body = self._body(list(prompts), list(completions), columns)
        try:
            return await asyncio.wrap_future(self._client.submit(self._path, body, read))
        except (RequestRefusedError, ServerError) as error:
            return [Invalid.of(error)] * size

    def _body(self, prompts: list, completions: list, columns: Mapping[str, Any]) -> dict[str, Any]:
        labels = columns.get(self._label_column)
        if self._shape == "slime":
            label = None if labels is None else labels[0]
            return {"prompt": prompts[0], "response": completions[0], "label": label}
        if self._shape == "openrlhf":
            query = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
            return {"query": query, "prompts": prompts, "labels": labels or [None] * len(prompts)}
        return {"prompts": prompts, "completions": completions, "columns": dict(columns)}


def _score(found: Any, reason: str) -> float | Invalid:
    if found is None:
        return Invalid(f"the reward service gave no score: {reason or 'it does not say why'}")
    score = float(found)
    return score if math.isfinite(score) else Invalid(f"the reward service's score is {score}")


@checked
class Verifier(Judge):
    """A function of one completion as a reward function, in processes with hard deadlines, without
    network, and with files that it cannot change.

    In `rewards`: `functions: [{function: rllib_llm.envs.judges.remote_rewards.Verifier,
    kwargs: {function: "my_checks:right", columns: [answer]}}]`, where `right(completion, answer)`
    returns a number, or None where it does not judge.

    Args:
        function: "module:name" or "file.py:name".
        columns: of the data set, which it gets by name beside `completion`.
        pool: further arguments of `WorkerPool`, among them what it may use: `network: true`,
            `environment: [HF_HOME]`, `readable: [tests]`, `writable: [cache]`.
    """

    wants_texts = True

    def __init__(self, function: str, columns: Sequence[str] = (), **pool: Any) -> None:
        self._pool = WorkerPool(function, **pool)
        self._columns = tuple(columns)
        self.needed_columns = [("columns", name) for name in columns]

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """The function's result for each completion; `Invalid` if it failed or timed out."""
        given = {name: as_json(required_column(columns, "columns", name)) for name in self._columns}
        rows = [{"completion": text} for text in completions]
        for name, values in given.items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        return self._pool.map(rows)


MISSING = "MathVerify needs math-verify: pip install 'rllib-llm[environments]'."


@checked
class MathVerify(Verifier):
    """1 where a completion's answer equals the data set's, mathematically; 0 where it does not.

    In `rewards`: `functions: [rllib_llm.envs.judges.remote_rewards.MathVerify]`.
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
        self.needed_columns = [("answer_column", answer_column)]

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """1.0 or 0.0 for each completion, `Invalid` where it could not be found out."""
        answers = required_column(columns, "answer_column", self._answer_column)
        rows = zip(completions, answers, strict=True)
        calls = [
            {"completion": c, "answer": str(answer)} for c, answer in rows if answer is not None
        ]
        scores = iter(self._pool.map(calls))
        return [None if answer is None else next(scores) for answer in answers]
