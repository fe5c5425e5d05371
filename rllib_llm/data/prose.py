"""Texts that were stored as tokens, put back as people write them."""

from __future__ import annotations

import re

# Penn Treebank's spelling of brackets and quotation marks, and the spaces around its tokens.
_REPLACEMENTS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"-lrb- ?", "("),
        (r" ?-rrb-", ")"),
        (r"`` ?", '"'),
        (r" ?''", '"'),
        (r"(?<=\w) n't\b", "n't"),
        (r"(?<=\w) ('(?:s|re|ve|ll|d|m)\b|'(?= |$))", r"\1"),
        (r" ([,.;:!?%)])", r"\1"),
        (r"([($#]) ", r"\1"),
        (r" {2,}", " "),
    )
)
_SENTENCE_START = re.compile(r"(^|[.!?]\s+)([a-z])")


def as_prose(text: str) -> str:
    """`text` with the spaces of tokenised corpora (Penn Treebank) removed, sentences capitalised.

    "it 's a joy , and you wo n't regret it ." becomes "It's a joy, and you won't regret it."
    """
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text.strip())
