"""Every sentence of the reviews' language, by kind of thing, with the sum of its opinions.

    body = [adverb] subject is adjective               "Sadly, the poles are very heavy."
         | [adverb] it does something                  "Luckily, it laughs at the wind."
         | subject is adjective and | but adjective    "It is roomy but leaky."
         | feeling part                                "I cannot stand the zipper."

Verbs and pronouns agree in number with what they speak of; "and" joins adjectives of one polarity,
"but" of two; an adverb in front agrees with the polarity that follows; parts and deeds belong to
the kind of thing. Each opinion (an adjective, a deed, a feeling) counts +1 or -1; "not" turns it
round.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from rllib_llm.envs import reviews_lexicon as words
from rllib_llm.envs.reviews_lexicon import KINDS, Kind


@dataclass(frozen=True)
class Sentence:
    """A sentence, the subject it speaks of, and the sum of its opinions."""

    text: str
    subject: str
    sentiment: int


def heads_of(kind: Kind) -> list[str]:
    """Return the ways a review of `kind` begins, up to and with the thing's name or a verb."""
    noun = f"{'these' if kind.plural else 'this'} {kind.name}"
    return [head.format(this=noun, This=noun.capitalize()) for head in words.HEADS]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _subjects(kind: Kind) -> list[tuple[str, str]]:
    """Return (subject, verb) of whatever can be called something; the pronoun comes first."""
    pronoun = ("they", "are") if kind.plural else ("it", "is")
    return [pronoun, *((f"the {part}", "are" if many else "is") for part, many in kind.parts)]


def _adjectives(kind: Kind, sign: int) -> tuple[str, ...]:
    return words.PRAISE + kind.good if sign > 0 else words.BLAME + kind.bad


def _claims(kind: Kind) -> list[Sentence]:
    """Return one opinion each, without capital and full stop: "the poles are very heavy"."""
    claims = []
    for (subject, verb), sign in itertools.product(_subjects(kind), (+1, -1)):
        graded = kind.good if sign > 0 else kind.bad
        opinions = [(word, sign) for word in _adjectives(kind, sign)]
        opinions += [(f"{degree} {word}", sign) for degree in words.DEGREES for word in graded]
        opinions += [(f"not {word}", -sign) for word in graded]
        claims += [Sentence(f"{subject} {verb} {text}", subject, s) for text, s in opinions]
    return claims


def _deeds(kind: Kind) -> list[Sentence]:
    """Return what the thing did, without capital and full stop: "it laughs at the wind"."""
    pronoun, _ = _subjects(kind)[0]
    signed = ((+1, kind.delights), (-1, kind.troubles))
    return [Sentence(f"{pronoun} {deed}", pronoun, s) for s, deeds in signed for deed in deeds]


def _stated(claims: list[Sentence]) -> list[Sentence]:
    return [Sentence(f"{_capital(c.text)}.", c.subject, c.sentiment) for c in claims]


def _exclaimed(claims: list[Sentence]) -> list[Sentence]:
    """Return the claims behind each adverb of their polarity: "Sadly, the poles are heavy."."""
    return [
        Sentence(f"{adverb}, {c.text}.", c.subject, c.sentiment)
        for c in claims
        for adverb in (words.GLAD if c.sentiment > 0 else words.SAD)
    ]


def _pairs(kind: Kind) -> list[Sentence]:
    """Return two adjectives joined: "It is roomy and quiet.", "It is roomy but leaky."."""
    sentences = []
    for (subject, verb), first, second in itertools.product(_subjects(kind), (1, -1), (1, -1)):
        link = "and" if first == second else "but"
        for one, other in itertools.product(_adjectives(kind, first), _adjectives(kind, second)):
            if one != other:
                text = f"{_capital(subject)} {verb} {one} {link} {other}."
                sentences.append(Sentence(text, subject, first + second))
    return sentences


def _feelings(kind: Kind) -> list[Sentence]:
    """Return what the writer feels for a part: "I cannot stand the zipper."."""
    signed = ((+1, words.LOVE), (-1, words.HATE))
    return [
        Sentence(f"{feeling} the {part}.", f"the {part}", sign)
        for sign, feelings in signed
        for feeling in feelings
        for part, _ in kind.parts
    ]


def _verdicts(kind: Kind) -> list[Sentence]:
    pronoun, verb = _subjects(kind)[0]
    forms = {
        "it": "them" if kind.plural else "it",
        "It": _capital(pronoun),
        "is": verb,
        "does": "do" if kind.plural else "does",
    }
    return [
        Sentence(line.format(**forms), "verdict", sign)
        for sign, lines in words.VERDICTS.items()
        for line in lines
    ]


@dataclass(frozen=True)
class Tables:
    """All sentences that may follow the opening of one kind's review.

    For drawing: the forms of body with their weights, and the verdicts, each by the sign of its
    sentiment. For looking up: every sentence by its text.
    """

    forms: list[dict[int, list[Sentence]]]
    weights: list[int]
    verdicts: dict[int, list[Sentence]]
    by_text: dict[str, Sentence]


def _by_sign(sentences: list[Sentence]) -> dict[int, list[Sentence]]:
    groups: dict[int, list[Sentence]] = {}
    for sentence in sentences:
        sign = (sentence.sentiment > 0) - (sentence.sentiment < 0)
        groups.setdefault(sign, []).append(sentence)
    return groups


@lru_cache(maxsize=len(KINDS))
def tables(kind: Kind) -> Tables:
    """Return the sentences of `kind`, made once per process."""
    claims, deeds, verdicts = _claims(kind), _deeds(kind), _verdicts(kind)
    weighted = [
        (5, _stated(claims)),
        (2, _stated(deeds)),
        (2, _exclaimed(claims) + _exclaimed(deeds)),
        (4, _pairs(kind)),
        (2, _feelings(kind)),
    ]
    return Tables(
        forms=[_by_sign(form) for _, form in weighted],
        weights=[weight for weight, _ in weighted],
        verdicts=_by_sign(verdicts),
        by_text={s.text: s for form in (*(f for _, f in weighted), verdicts) for s in form},
    )
