"""Whether two mathematical answers are the same; runs in a worker process, see `envs/sandbox.py`.

The limits of math-verify itself are off: they use SIGALRM, which fails outside of a main thread and
leaves a score of 0 for every answer. The worker's deadline holds instead.
"""

from __future__ import annotations

import math
import re
from typing import Any
from unicodedata import normalize

from math_verify import parse, verify
from sympy import Number

_GSM8K = "####"  # stands before the answer in GSM8K's solutions
_DELIMITED = ("$", "\\(", "\\[")
_SAID = re.compile(r"\banswer(?:\s+is(?!\s+not\b)|\s*:)[\s:*]*([^\n]*)", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?:\(([A-Ja-j])\)(?!\s*[-+*/^=<>])|([A-J])(?=[.):]|\s+because\b|$))"
    r"(?!\s*(?:[,/&]|and\b|or\b)\s*\(?[A-J]\b)"
)  # one of several answers, with or without words after it
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_WORDS = re.compile(r"no|(?![a-z]{2}$)[^\W\d_]{2,}(?:[ ,'.-]+[^\W\d_]+)*")  # "xy" is a product
_CLOCK = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d+(?::\d+)+(?: ?[ap]m\b)?",
    re.IGNORECASE,
)  # dates, times and ratios, which are neither differences nor quotients
_FORMULA = re.compile(
    r"(?:\\[A-Za-z]+|\\(?![A-Za-z])|[^\\A-Za-z$\n]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+"
)
_SIGNS: dict[int, int | str] = {  # of Unicode, as LaTeX or ASCII has them
    **{0xFF00 + code - 0x20: code for code in range(0x21, 0x7F)}, 0x2212: "-",
    **{ord(c): rf"\frac{{{n}}}{{{d}}}" for c, n, d in zip("½⅓⅔¼¾", "11213", "23344", strict=True)},
}  # fmt: skip
_GROUPED = re.compile(r"-?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")


def check(completion: str, answer: str) -> float:
    r"""1.0 where the completion's last answer equals `answer`, else 0.0, also where it has none.

    An answer is what the last \boxed{...} holds (nothing, where that is cut off), else what follows
    the last ####, else the text. Words, choices, dates and times are compared as text, also with
    what follows the last "answer is" or "answer:"; the rest by math-verify, small numbers to six
    significant digits. Without a box a formula alone is also read as if it stood
    in one.

    Raises:
        ValueError: `answer` cannot be read; what the policy said is not to blame.
    """
    gold, said = _answer(str(answer)), _answer(completion)
    right = _plain(gold)
    text = _plain(said if "\\boxed" in completion else (_SAID.findall(said) or [said])[-1])
    chosen = _CHOICE.match(text)
    choice = _CHOICE.fullmatch(right)
    if choice and chosen and (choice[1] or choice[2]).upper() == (chosen[1] or chosen[2]).upper():
        return 1.0
    if _CLOCK.fullmatch(right):
        moments = [_moment(found) for found in _CLOCK.findall(text)]
        return float(_moment(right) in (moments[-1], moments[-1].rstrip("apm")) if moments else 0)
    if _WORDS.fullmatch(right):
        return float(text.casefold() == right.casefold())
    wanted = _parsed(gold, boxed=not any(mark in gold for mark in _DELIMITED))
    if not wanted:
        raise ValueError(f"answer={answer!r} must be readable by math-verify")
    has_box, alone = "\\boxed" in completion, (_SAID.findall(said) or [said])[-1]
    readings = [_parsed(said, boxed=has_box)]
    if not has_box and _FORMULA.fullmatch(alone):
        readings.append(_parsed(alone, boxed=True))
    for found in filter(None, readings):
        numbers = (n for n in wanted + found if isinstance(n, Number) and n.is_finite and n)
        sizes = filter(None, (abs(float(n)) for n in numbers))
        digits = max([6, *(5 - math.floor(math.log10(size)) for size in sizes)])
        how = {"timeout_seconds": None, "raise_on_error": True}
        if verify(wanted, found, float_rounding=digits, **how):
            return 1.0
    return 0.0


def _answer(text: str) -> str:
    """The part of a text that is its answer, without what only writes numbers prettily."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: f"^{{{normalize('NFKC', m[0])}}}", text)
    text = re.sub(r"\\[,!;:]|\{,\}", "", text.translate(_SIGNS).replace("\\$", ""))
    text = re.sub(r"(?<=\d)[eE]([+-]?\d+)\b", r"\\cdot 10^{\1}", text)
    _, box, rest = text.rpartition("\\boxed{")
    if not box:
        return text.rpartition(_GSM8K)[2].strip()
    depth = 1
    for end, sign in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if not depth:
            return rest[:end].strip()
    return ""


def _parsed(text: str, *, boxed: bool) -> list[Any]:
    if boxed:
        inner = text.replace("$", "").strip().rstrip(".")
        inner = re.sub("[, ]", "", inner) if _GROUPED.fullmatch(inner) else inner
        text = f"\\boxed{{{inner}}}" if inner else ""
    return parse(text, parsing_timeout=None, raise_on_error=False)


def _moment(text: str) -> str:
    return re.sub(r"\b0+(?=\d)", "", text.replace(" ", "").casefold())


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[*_`$\"]", "", _WRAPPED.sub(r"\1", text)).split()).strip(" .!:")
