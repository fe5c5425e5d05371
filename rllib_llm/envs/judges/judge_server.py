"""A reward function that asks a judge model on a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import dataclass
from typing import Any

from rllib_llm.openai_client import OpenAIClient, ServerError

logger = logging.getLogger(__name__)

TEMPLATE = (
    "Rate how good the answer to the request is, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)


@dataclass(frozen=True)
class _NoScore:
    """A reply that is no score."""

    reply: str
    rule: str

    def __str__(self) -> str:
        return (
            f"the judge's reply={self.reply[:200]!r} must {self.rule}. Change template, system, "
            "pattern, low, high or max_tokens, or take another judge."
        )


class JudgeServer:
    """Scores completions with the number that a chat model replies.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judges.judge_server.JudgeServer,
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

    wants_texts = True  # of chats, too: they are filled into the template

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
        self._reason = ""
        self._num_retried = 0

    async def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float]:
        """One score per completion, NaN (not learnt from) where the judge gave none.

        Raises:
            RequestRefusedError: the server refuses the request (wrong key, unknown model).
        """
        num_before = self._client.num_retries
        requests = [
            self._client.submit("chat/completions", body, self._read_score)
            for body in self._bodies(prompts, completions, columns)
        ]
        answers = await asyncio.gather(*map(asyncio.wrap_future, requests), return_exceptions=True)
        scores = [self._score(answer) for answer in answers]
        missing = [str(answer) for answer in answers if not isinstance(answer, float)]
        self._reason = missing[0] if missing else ""
        self._num_retried = self._client.num_retries - num_before
        if missing:
            logger.warning(
                "%d of %d completions have no score: %s", len(missing), len(answers), missing[0]
            )
        return scores

    def metrics(self) -> dict[str, float]:
        """requests_retried: how often the server was asked again in the last call."""
        return {"requests_retried": float(self._num_retried)}

    def missing_reason(self) -> str:
        """Why the first completion of the last call that has no score has none."""
        return self._reason

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

    def _read_score(self, answer: Any) -> float | _NoScore:
        """The score in a reply."""
        reply = answer["choices"][0]["message"]["content"]
        match = self._pattern.search(reply)
        if match is None:
            return _NoScore(reply, f"hold a match of pattern={self._pattern.pattern!r}")
        found = match.group(1) if self._pattern.groups else match.group()
        try:
            score = float(found)
        except (TypeError, ValueError):  # the group took no part, or took more than a number
            return _NoScore(reply, f"hold a number where pattern={self._pattern.pattern!r} looks")
        if not self._low <= score <= self._high:
            return _NoScore(reply, f"give a score from {self._low} to {self._high}")
        return score

    @staticmethod
    def _score(answer: Any) -> float:
        if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
            raise answer
        return answer if isinstance(answer, float) else math.nan
