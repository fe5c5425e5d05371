"""A reward function that asks a judge model on a server with OpenAI's interface."""

from __future__ import annotations

import logging
import re
from typing import Any

from rllib_llm.envs.judges.judge_model import (
    JudgeModel,
    Messages,
    UnreadableReply,
    without_thoughts,
)
from rllib_llm.envs.judges.reward_functions import Invalid, Judge

logger = logging.getLogger(__name__)

_NUMBER = r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w]|\.\d)"
_NAMED_SCORE = re.compile(
    rf"\b(?:score|rating|grade|verdict)\b[\s*_`\"']*(?:is|of|[:=])[\s*_`\"']*({_NUMBER})",
    re.IGNORECASE,
)

TEMPLATE = (
    "Rate how good the answer to the request is, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)


class JudgeServer(Judge):
    """Scores completions with the number that a chat model replies.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judges.judge_server.JudgeServer,
    kwargs: {base_url: "http://localhost:8000/v1", model: my-judge}}]`.

    Args:
        base_url: of the server.
        model: the server's name for the judge.
        template: the request; {prompt}, {completion} and the data set's columns are filled in.
        system: the system message, or None.
        pattern: regular expression of the score in the reply; its last match behind the judge's
            thoughts (group 1, where it has groups) is read as a number. None: a reply that is a
            number or names one score ("8", "Score: 8", "On a scale of 0 to 10: 8", "8/10"); one
            with several is not guessed at.
        low, high: allowed scores; another number counts as no answer.
        judge: further arguments of `JudgeModel`: max_tokens, temperature, cache, budget, retries.
    """

    wants_texts = wants_transcripts = True  # of chats, too: they are filled into the template

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        system: str | None = None,
        pattern: str | None = None,
        low: float = 0.0,
        high: float = 10.0,
        **judge: Any,
    ) -> None:
        if not low < high:
            raise ValueError(
                f"low={low!r} must be below high={high!r}: they bound the scores. Swap them."
            )
        self._judge = JudgeModel(base_url, model, **judge)
        self._template, self._system = template, system
        self._pattern = None if pattern is None else re.compile(pattern)
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
        said = without_thoughts(reply)
        found: Any = None
        if self._pattern is None:
            found = stated_score(said, self._low, self._high)
            rule = f"name one score from {self._low:g} to {self._high:g}"
        else:
            matches = list(self._pattern.finditer(said))
            found = matches[-1][1 if self._pattern.groups else 0] if matches else None
            rule = f"hold a number where pattern={self._pattern.pattern!r} looks"
        try:
            score = float(found)
        except (TypeError, ValueError) as error:  # none, or more than a number
            raise _no_score(reply, rule) from error
        if not self._low <= score <= self._high:
            raise _no_score(reply, f"give a score from {self._low} to {self._high}")
        return score


def stated_score(said: str, low: float, high: float) -> float | None:
    """The one score that a reply states, None where it states none or it is not clear which.

    A scale ("from 0 to 10", "/10", "out of 10") is no score. Of several numbers the one counts that
    is called score, rating or grade, or that stands alone in the last line.
    """
    ends = rf"{low:g}(?:\.0+)?\s*(?:to|and|[-–—]|\.\.)\s*{high:g}(?:\.0+)?(?![\d.]*\d)"
    text = re.sub(rf"(?<![\d.]){ends}", " ", said)
    text = re.sub(rf"(?<=\d)[\s*]*(?:/|out of|of)[\s*]*{high:g}(?:\.0+)?(?![\d.]*\d)", " ", text)
    numbers = {float(number) for number in re.findall(_NUMBER, text)}
    if len(numbers) == 1:
        return numbers.pop()
    named = [float(match[1]) for match in _NAMED_SCORE.finditer(text)]
    if named:
        return named[-1]
    last = text.strip().rpartition("\n")[2].strip(" *_.`")
    return float(last) if re.fullmatch(_NUMBER, last) else None


def _no_score(reply: str, rule: str) -> UnreadableReply:
    return UnreadableReply(
        f"the judge's reply={reply[:200]!r} must {rule}. Change template, system, pattern, low, "
        "high or max_tokens, or take another judge."
    )
