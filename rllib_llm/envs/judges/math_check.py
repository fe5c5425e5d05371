"""Whether two mathematical answers are the same; runs in a worker process, see `worker.py`.

The limits of math-verify itself are off: they use SIGALRM, which fails outside of a main thread and
leaves a score of 0 for every answer. The worker's deadline holds instead.
"""

from __future__ import annotations

from math_verify import parse, verify

_DELIMITED = ("$", "\\boxed", "\\(", "\\[")
_GSM8K = "####"  # stands before the answer in GSM8K's solutions


class GoldAnswerError(ValueError):
    """A right answer that cannot be read."""


def check(completion: str, answer: str) -> float:
    """1.0 where the completion's last answer equals `answer`, else 0.0, also where it has none.

    `answer`: LaTeX or text, as a whole the answer, or with the answer in $...$ or \\boxed{...}, or
    behind GSM8K's ####.

    Raises:
        GoldAnswerError: `answer` cannot be read; what the policy said is not to blame.
    """
    gold = str(answer).rpartition(_GSM8K)[2].strip()
    if not any(mark in gold for mark in _DELIMITED):
        gold = f"\\boxed{{{gold}}}"
    right = parse(gold, parsing_timeout=None, raise_on_error=True)
    if not right:
        raise GoldAnswerError(f"answer={answer!r} must be readable by math-verify")
    said = parse(completion, parsing_timeout=None, raise_on_error=False)
    return float(bool(said) and verify(right, said, timeout_seconds=None, raise_on_error=True))
