"""A reward function that asks a judge model on a server with OpenAI's interface."""

from __future__ import annotations

import logging
import re
from typing import Any

from rllib_llm.envs.judges.asking import JudgeModel, Messages, UnreadableReply
from rllib_llm.envs.judges.reward_functions import Invalid

logger = logging.getLogger(__name__)

TEMPLATE = (
    "Rate how good the answer to the request is, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
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
        judge: further arguments of `JudgeModel`: temperature, cache, budget, retries.
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
        **judge: Any,
    ) -> None:
        if not low < high:
            raise ValueError(
                f"low={low!r} must be below high={high!r}: they bound the scores. Swap them."
            )
        self._judge = JudgeModel(base_url, model, max_tokens=max_tokens, **judge)
        self._template, self._system = template, system
        self._pattern = re.compile(pattern)
        self._low, self._high = low, high

    async def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float | Invalid]:
        """One score per completion, `Invalid` where the judge gave none.

        Raises:
            RequestRefusedError: the server refuses the request (wrong key, unknown model).
        """
        questions = self._questions(prompts, completions, columns)
        scores = await self._judge.ask(questions, self._read_score)
        missing = [score for score in scores if isinstance(score, Invalid)]
        if missing:
            logger.warning(
                "%d of %d completions have no score: %s", len(missing), len(scores), missing[0]
            )
        return scores

    def metrics(self) -> dict[str, float]:
        """See `JudgeModel.metrics`."""
        return self._judge.metrics()

    def _questions(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> list[Messages]:
        questions = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[i] for name, values in columns.items() if name != "completion_ids"}
            text = self._template.format(**{**row, "prompt": prompt, "completion": completion})
            messages = [{"role": "user", "content": text}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system})
            questions.append(messages)
        return questions

    def _read_score(self, reply: str) -> float:
        """The score in a reply."""
        match = self._pattern.search(reply)
        if match is None:
            raise _no_score(reply, f"hold a match of pattern={self._pattern.pattern!r}")
        found = match.group(1) if self._pattern.groups else match.group()
        try:
            score = float(found)
        except (TypeError, ValueError) as error:  # the group took no part, or more than a number
            rule = f"hold a number where pattern={self._pattern.pattern!r} looks"
            raise _no_score(reply, rule) from error
        if not self._low <= score <= self._high:
            raise _no_score(reply, f"give a score from {self._low} to {self._high}")
        return score


def _no_score(reply: str, rule: str) -> UnreadableReply:
    return UnreadableReply(
        f"the judge's reply={reply[:200]!r} must {rule}. Change template, system, pattern, low, "
        "high or max_tokens, or take another judge."
    )
