"""Whether two mathematical answers are the same; runs in a worker process, see `envs/sandbox.py`.

The limits of math-verify itself are off: they use SIGALRM, which fails outside of a main thread and
leaves a score of 0 for every answer. The worker's deadline holds instead.
"""

from __future__ import annotations

import re

from math_verify import parse, verify

_DELIMITED = ("$", "\\boxed", "\\(", "\\[")
_GSM8K = "####"  # stands before the answer in GSM8K's solutions
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_SAID = re.compile(r"(?:####|\banswer(?:\s+is|\s*:))\s*([^\n]*)", re.IGNORECASE)
_CHOICE = re.compile(r"^\(([a-z])\)$")  # of several answers
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")


class GoldAnswerError(ValueError):
    """A right answer that cannot be read."""


def check(completion: str, answer: str) -> float:
    r"""1.0 where the completion's last answer equals `answer`, else 0.0, also where it has none.

    `answer`: LaTeX or text, as a whole the answer, or with the answer in $...$ or \boxed{...}, or
    behind GSM8K's ####. An answer of words ("Paris") is compared as text, with what the completion
    puts in its last \boxed{...}, behind its last "answer is", "answer:" or ####, or says in all.

    Raises:
        GoldAnswerError: `answer` cannot be read; what the policy said is not to blame.
    """
    gold = str(answer).rpartition(_GSM8K)[2].strip()
    if _says_text(completion, gold):
        return 1.0
    if not any(mark in gold for mark in _DELIMITED):
        gold = f"\\boxed{{{gold}}}"
    right = parse(gold, parsing_timeout=None, raise_on_error=True)
    if not right:
        raise GoldAnswerError(f"answer={answer!r} must be readable by math-verify")
    said = parse(completion, parsing_timeout=None, raise_on_error=False)
    return float(bool(said) and verify(right, said, timeout_seconds=None, raise_on_error=True))


def _says_text(completion: str, gold: str) -> bool:
    """Whether a completion's answer is `gold` letter for letter, but for case and punctuation."""
    right = _plain(gold)
    if not any(letter.isalpha() for letter in right):
        return False
    boxed, said = _BOXED.findall(_WRAPPED.sub(r"\1", completion)), _SAID.findall(completion)
    answer = boxed[-1] if boxed else said[-1] if said else completion
    return _plain(answer) == right


def _plain(text: str) -> str:
    unwrapped = _BOXED.sub(r"\1", _WRAPPED.sub(r"\1", text))
    text = " ".join(re.sub(r"[*_`$\"']", "", unwrapped).split()).strip(" .!:").casefold()
    return _CHOICE.sub(r"\1", text)
