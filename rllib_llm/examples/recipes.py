"""Rows and a reward of the recipes in `tuned_examples`, from data sets as they are published."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from rllib_llm.data.preferences import pairs_from_labels
from rllib_llm.data.rows import require_columns
from rllib_llm.data.sources import Source, load_rows

_CALCULATION = re.compile(r"<<[^>]*>>")  # GSM8K's notes for a calculator
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NAMES = ("Tom", "Ana", "Li", "Sam", "Mia", "Ben")
_THINGS = ("apples", "books", "coins", "pens", "cards", "shells")
_STORIES = (
    ("{name} has {a} boxes with {b} {things} each and finds {c} more {things}. How many {things} "
     "does {name} have now?", lambda a, b, c: a * b + c),
    ("{name} had {a} bags of {b} {things} and gave {c} {things} away. How many {things} are left?",
     lambda a, b, c: a * b - c),
    ("{name} buys {a} {things} on Monday, {b} on Tuesday and {c} on Friday. How many {things} is "
     "that?", lambda a, b, c: a + b + c),
)  # fmt: skip


def gsm8k(data: Source) -> list[dict[str, Any]]:
    """Rows {"prompt", "completion", "answer"} of GSM8K (Cobbe et al. 2021), or of rows like its
    {"question", "answer"}.

    A prompt is a chat with the question, a completion the solution, which ends in "#### 72", and an
    answer that number as text.
    """
    rows = load_rows(data)
    require_columns(rows, ["question", "answer"])
    return [
        {
            "prompt": _question(f"{row['question']}\nEnd with #### and the number."),
            "completion": _CALCULATION.sub("", row["answer"]),
            "answer": row["answer"].rpartition("####")[2].strip(),
        }
        for row in rows
    ]


def openings(
    data: Source, num_words: int, column: str = "prompt", num_rows: int | None = None
) -> list[dict[str, str]]:
    """Rows of one `column`: the first `num_words` words of each row's `text`.

    num_rows: of rows at even distances, since published data is often sorted by label; None: all.
    """
    rows = load_rows(data)
    require_columns(rows, ["text"])
    count = min(num_rows or len(rows), len(rows))
    chosen = (rows[i * len(rows) // count] for i in range(count))
    return [{column: _opening(row["text"], num_words)} for row in chosen]


def sentiment_pairs(
    data: Source, num_words: int, num_pairs: int | None = None
) -> list[dict[str, str]]:
    """Pairs of openings of reviews, a positive one chosen and a negative one rejected; see
    `pairs_from_labels`."""
    rewrite = functools.partial(_opening, num_words=num_words)
    return pairs_from_labels(data, num_pairs=num_pairs, rewrite=rewrite)


def word_problems(num_problems: int = 4000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"prompt", "answer"}: chats with a sum in words, of numbers with two to three digits."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_problems):
        story, solve = draw.choice(_STORIES)
        a, b, c = draw.randint(12, 99), draw.randint(101, 999), draw.randint(11, 99)
        text = story.format(name=draw.choice(_NAMES), things=draw.choice(_THINGS), a=a, b=b, c=c)
        rows.append({"prompt": _question(text), "answer": str(solve(a, b, c))})
    return rows


def right_number(completions: list[Any], answer: list[str]) -> list[float]:
    """1 where the last number of a completion, or of a conversation's last message, is the answer;
    0 where it is another one, or there is none."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [
        float(_last_number(text) == _last_number(right) is not None)
        for text, right in zip(texts, answer, strict=True)
    ]


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _opening(text: str, num_words: int) -> str:
    return " ".join(text.replace("<br />", " ").split()[:num_words])
