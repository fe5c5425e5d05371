"""Preference pairs from rows that carry a label, such as reviews with a sentiment or a rating."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from rllib_llm.data.order import EpochOrder
from rllib_llm.data.rows import DataSourceError, Rows, require_columns
from rllib_llm.data.sources import Source, load_rows
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import SettingError


def pairs_from_labels(
    path: Source,
    *,
    text_column: str = "text",
    label_column: str = "label",
    num_pairs: int | None = None,
    seed: int = 0,
    rewrite: str | Callable[[str], str] | None = None,
) -> list[dict[str, str]]:
    """Rows {"chosen", "rejected"}: a text of a higher label and one of a lower label.

    Texts of each label are drawn in a seeded order, each once before any is drawn again; with more
    than two labels every two of them take turns. The same arguments give the same pairs.

    In YAML: `data: {path: rllib_llm.data.pairs.pairs_from_labels, kwargs: {path: FILE, ...}}`.

    Args:
        path: any source of `load_rows`.
        text_column, label_column: columns of the text and of its label, a number (or true, false).
        num_pairs: how many; None: until the texts of the commonest label have all been drawn once.
        seed: of the order, 0 or more.
        rewrite: function of a text, or its dotted path, applied to every text: e.g.
            `rllib_llm.data.pairs.as_prose` where reviews are stored as tokens.

    Raises:
        DataSourceError: no such column, a label that is no number, or only one label.
        ValueError: `num_pairs` below 1.
    """
    if num_pairs is not None and num_pairs < 1:
        raise SettingError(
            name="num_pairs",
            value=num_pairs,
            rule="be at least 1, or null",
            reason="it counts preference pairs",
            remedy="Leave it out to draw every text once",
        )
    rows = load_rows(path)
    require_columns(rows, [text_column, label_column])
    groups = _texts_by_label(rows, text_column, label_column)
    change = import_dotted(rewrite, name="rewrite") if isinstance(rewrite, str) else rewrite
    if change is not None:
        groups = {label: [change(text) for text in texts] for label, texts in groups.items()}
    matches = list(itertools.combinations(sorted(groups), 2))  # (lower, higher)
    if num_pairs is None:
        num_turns = math.ceil(max(map(len, groups.values())) / (len(groups) - 1))
        num_pairs = num_turns * len(matches)
    draws = {label: _draws(texts, seed) for label, texts in groups.items()}
    pairs = []
    for lower, higher in itertools.islice(itertools.cycle(matches), num_pairs):
        pairs.append({"chosen": next(draws[higher]), "rejected": next(draws[lower])})
    return pairs


def _draws(texts: list[str], seed: int):
    order = EpochOrder(len(texts), seed)
    for position in itertools.count():
        yield texts[int(order.indices(position, 1)[0])]


def _texts_by_label(rows: Rows, text_column: str, label_column: str) -> dict[float, list[str]]:
    groups: dict[float, list[str]] = {}
    for number, row in enumerate(rows):
        label: Any = row[label_column]
        if not isinstance(label, int | float) or not math.isfinite(label):
            raise DataSourceError(
                f"{label_column}={label!r} in row {number} of {rows.description} must be a finite "
                "number: the text of the higher label is the chosen one. Write labels as numbers, "
                "the better the higher."
            )
        if not isinstance(row[text_column], str):
            raise DataSourceError(
                f"{text_column}={row[text_column]!r} in row {number} of {rows.description} must be "
                "text: it is what is compared. Name another column, or drop the row."
            )
        groups.setdefault(float(label), []).append(row[text_column])
    if len(groups) < 2:
        raise DataSourceError(
            name=f"{label_column} of {rows.description}",
            rule="hold at least two different labels",
            reason=f"all {len(rows)} rows have {next(iter(groups))}",
            remedy="Name the column of the labels",
        )
    return groups


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
