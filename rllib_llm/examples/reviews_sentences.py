"""Every sentence of the reviews' language, by kind of thing, with the sum of its opinions.

    body = subject is [degree | not] adjective         "The pole is very heavy."
         | subject is adjective and | but adjective    "It is lovely but heavy."
         | adverb, subject is adjective                "Sadly, the pole is heavy."
         | [adverb,] it does something                 "Luckily, it laughs at the wind."
         | feeling part                                "I cannot stand the zipper."

The subject is the thing ("it") or one of its parts ("the pole").

"And" joins adjectives of one polarity, "but" of two; an adverb in front agrees with the polarity
that follows; parts and deeds belong to the kind of thing. Each opinion (an adjective, a deed, a
feeling) counts +1 or -1; "not" turns it round.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from rllib_llm.examples import reviews_lexicon as words
from rllib_llm.examples.reviews_lexicon import KINDS, Kind

SIGNS = (+1, -1)
FORM_WEIGHTS = (3, 5, 2, 2)  # of the forms of body, in the order of `tables`


@dataclass(frozen=True)
class Sentence:
    """A sentence and the sum of its opinions."""

    text: str
    sentiment: int


@dataclass(frozen=True)
class Table:
    """Sentences of one role in a review: in forms to draw from, and by text to look up.

    `forms` holds the sentences of each form by the sign of their sentiment.
    """

    forms: list[dict[int, list[Sentence]]]
    sentiments: dict[str, int]


@dataclass(frozen=True)
class Tables:
    """All sentences that may follow the opening of one kind's review."""

    of_thing: Table
    of_part: Table
    verdicts: Table


@lru_cache(maxsize=len(KINDS))
def tables(kind: Kind) -> Tables:
    """Return the sentences of `kind`, made once per process."""
    thing, parts = ["it"], [f"the {part}" for part in kind.parts]
    claims, deeds = _claims(thing), _deeds(kind)
    of_thing = (
        _stated(claims) + _graded(thing),
        _pairs(thing),
        _exclaimed(claims) + _exclaimed(deeds),
        _stated(deeds),
    )
    claims = _claims(parts)
    of_part = (
        _stated(claims) + _graded(parts),
        _pairs(parts),
        _exclaimed(claims),
        _feelings(kind),
    )
    return Tables(_table(*of_thing), _table(*of_part), _table(_verdicts()))


def _table(*forms: list[Sentence]) -> Table:
    by_sign: list[dict[int, list[Sentence]]] = [{} for _ in forms]
    for groups, sentences in zip(by_sign, forms, strict=True):
        for sentence in sentences:
            sign = (sentence.sentiment > 0) - (sentence.sentiment < 0)
            groups.setdefault(sign, []).append(sentence)
    return Table(by_sign, {s.text: s.sentiment for form in forms for s in form})


def heads_of(kind: Kind) -> list[str]:
    """Return the ways a review of `kind` begins, up to and with the thing's name or a verb."""
    noun = f"this {kind.name}"
    return [head.format(this=noun, This=noun.capitalize()) for head in words.HEADS]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _own(sign: int) -> tuple[str, ...]:
    """Return the adjectives that may be graded and negated."""
    return words.GOOD if sign > 0 else words.BAD


def _general(sign: int) -> tuple[str, ...]:
    return words.PRAISE if sign > 0 else words.BLAME


def _claims(subjects: list[str]) -> list[Sentence]:
    """Return one opinion each, without capital and full stop: "the pole is heavy"."""
    return [
        Sentence(f"{subject} is {word}", sign)
        for sign in SIGNS
        for subject in subjects
        for word in _general(sign) + _own(sign)
    ]


def _deeds(kind: Kind) -> list[Sentence]:
    """Return what the thing did, without capital and full stop: "it laughs at the wind"."""
    return [
        Sentence(f"it {deed}", sign)
        for sign in SIGNS
        for deed in (kind.delights if sign > 0 else kind.troubles)
    ]


def _stated(claims: list[Sentence]) -> list[Sentence]:
    return [Sentence(f"{_capital(claim.text)}.", claim.sentiment) for claim in claims]


def _exclaimed(claims: list[Sentence]) -> list[Sentence]:
    """Return the claims behind each adverb of their polarity: "Sadly, the pole is heavy."."""
    return [
        Sentence(f"{adverb}, {claim.text}.", claim.sentiment)
        for claim in claims
        for adverb in (words.GLAD if claim.sentiment > 0 else words.SAD)
    ]


def _graded(subjects: list[str]) -> list[Sentence]:
    """Return "The pole is very heavy." and "The pole is not heavy."."""
    changes = [(degree, +1) for degree in words.DEGREES] + [("not", -1)]
    return [
        Sentence(f"{_capital(subject)} is {change} {word}.", sign * turn)
        for sign in SIGNS
        for subject in subjects
        for change, turn in changes
        for word in _own(sign)
    ]


def _pairs(subjects: list[str]) -> list[Sentence]:
    """Return two adjectives joined: "It is lovely and light.", "It is lovely but heavy."."""
    return [
        Sentence(f"{_capital(subject)} is {general} {link} {own}.", first + second)
        for first, second in itertools.product(SIGNS, SIGNS)
        for link in (["and"] if first == second else ["but"])
        for subject in subjects
        for general in _general(first)
        for own in _own(second)
    ]


def _feelings(kind: Kind) -> list[Sentence]:
    """Return what the writer feels for a part: "I cannot stand the zipper."."""
    return [
        Sentence(f"{feeling} the {part}.", sign)
        for sign in SIGNS
        for feeling in (words.LOVE if sign > 0 else words.HATE)
        for part in kind.parts
    ]


def _verdicts() -> list[Sentence]:
    return [Sentence(line, sign) for sign, lines in words.VERDICTS.items() for line in lines]
