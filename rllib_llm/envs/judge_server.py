"""A reward function that asks a judge model on a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from typing import Any

from rllib_llm.openai_client import OpenAIClient, ServerError

logger = logging.getLogger(__name__)

TEMPLATE = (
    "Rate how good the answer to the request is, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)


class JudgeServer:
    """Scores completions with the number that a chat model replies.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judge_server.JudgeServer,
    kwargs: {base_url: "http://localhost:8000/v1", model: my-judge}}]`.

    Args:
        base_url: of the server.
        model: the server's name for the judge.
        template: the request; {prompt}, {completion} and the data set's columns are filled in.
        system: the system message, or None.
        pattern: regular expression of the score in the reply; its first match (group 1, where it
            has groups) is read as a number.
        low, high: allowed scores; another number counts as no answer.
        max_tokens: longest reply.
        temperature: of the judge; 0 makes replies repeatable.
        client: further arguments of `OpenAIClient`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        system: str | None = None,
        pattern: str = r"[-+]?\d+(?:\.\d+)?",
        low: float = 0.0,
        high: float = 10.0,
        max_tokens: int = 16,
        temperature: float = 0.0,
        **client: Any,
    ) -> None:
        if not low < high:
            raise ValueError(
                f"low={low!r} must be below high={high!r}: they bound the scores. Swap them."
            )
        self._client = OpenAIClient(base_url, **client)
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._template, self._system = template, system
        self._pattern = re.compile(pattern)
        self._low, self._high = low, high

    async def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float]:
        """One score per completion, NaN (not learnt from) where the judge gave none.

        Raises:
            RequestRefusedError: the server refuses the request (wrong key, unknown model).
        """
        requests = [
            self._client.submit("chat/completions", body, self._read_score)
            for body in self._bodies(prompts, completions, columns)
        ]
        answers = await asyncio.gather(
            *map(asyncio.wrap_future, requests), return_exceptions=True
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, ServerError):
                raise failure
        if failures:
            logger.warning(
                "%d of %d completions have no score: %s", len(failures), len(answers), failures[0]
            )
        return [float("nan") if isinstance(a, BaseException) else a for a in answers]

    def _bodies(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> list[dict[str, Any]]:
        bodies = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[i] for name, values in columns.items() if name != "completion_ids"}
            text = self._template.format(**{**row, "prompt": prompt, "completion": completion})
            messages = [{"role": "user", "content": text}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system})
            bodies.append({**self._body, "messages": messages})
        return bodies

    def _read_score(self, answer: Any) -> float:
        """The score in a reply; NaN where it holds none within the bounds."""
        reply = answer["choices"][0]["message"]["content"]
        match = self._pattern.search(reply)
        if match is None:
            return math.nan
        score = float(match.group(1) if self._pattern.groups else match.group())
        return score if self._low <= score <= self._high else math.nan
