"""The words of the reviews, and every sentence of their language with the sum of its opinions.

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


@dataclass(frozen=True)
class Kind:
    """A kind of thing: its name, its parts, and what only its reviews say it did."""

    name: str
    parts: tuple[str, ...]
    delights: tuple[str, ...]  # what "it" did well, a verb phrase
    troubles: tuple[str, ...]


KINDS = (
    Kind(
        "coffee maker",
        ("lid", "timer", "filter"),
        ("brews in two minutes", "never spills a drop"),
        ("leaks all over", "burns every cup"),
    ),
    Kind(
        "guitar",
        ("neck", "bridge", "case"),
        ("stays in tune", "makes every song shine"),
        ("falls out of tune", "scares the cat"),
    ),
    Kind(
        "backpack",
        ("strap", "zipper", "pocket"),
        ("fits under every seat", "keeps out the rain"),
        ("smells of fish", "fell apart in one week"),
    ),
    Kind(
        "tent",
        ("pole", "floor", "roof"),
        ("goes up in ten seconds", "laughs at the wind"),
        ("lets in the bugs", "smells of wet dog"),
    ),
    Kind(
        "novel",
        ("plot", "ending", "cover"),
        ("kept me up all night", "made me laugh on the train"),
        ("put me to sleep", "gives away the murderer"),
    ),
    Kind(
        "bicycle",
        ("saddle", "bell", "chain"),
        ("climbs every hill", "turns on a coin"),
        ("squeaks all day", "goes nowhere fast"),
    ),
)

# The opening of a review: a head, which names the thing, and a tail.
OWNERS = ("aunt", "uncle", "boss", "sister", "brother", "neighbor", "cousin", "dentist")
HEADS = (
    *(f"My {owner} {verb} me {{this}}" for owner in OWNERS for verb in ("gave", "bought")),
    *(f"{who} {verb} {{this}}" for who in ("I", "We") for verb in ("bought", "ordered", "won")),
    "{This} arrived",
    "{This} came",
)
TAILS = (
    "last week",
    "in June",
    "on a whim",
    "by mistake",
    "two months ago",
    "after a long wait",
    "for my birthday",
    "in a huge box",
)

# Said of any thing and any part; neither graded nor negated.
PRAISE = ("wonderful", "lovely", "superb", "brilliant")
BLAME = ("awful", "terrible", "dreadful", "useless")
# Said of any thing and any part; may be graded ("very ...") and negated ("not ...").
GOOD = ("sturdy", "light", "quiet", "clever", "comfortable", "elegant")
BAD = ("flimsy", "heavy", "noisy", "clumsy", "itchy", "stiff")
DEGREES = ("very", "really")
GLAD = ("Luckily", "Happily", "To my delight")
SAD = ("Sadly", "Worse", "To my horror")
LOVE = ("I love", "I adore", "I am proud of")
HATE = ("I hate", "I cannot stand", "I am sick of")

VERDICTS = {
    +1: (
        "Five stars.",
        "I would buy it again.",
        "It is worth every cent.",
        "My friends all want it now.",
    ),
    0: (
        "Three stars.",
        "It does the job.",
        "You get what you pay for.",
    ),
    -1: (
        "One star.",
        "I sent it back.",
        "I want my money back.",
        "I gave it to my worst enemy.",
    ),
}

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
    return [head.format(this=noun, This=noun.capitalize()) for head in HEADS]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _own(sign: int) -> tuple[str, ...]:
    """Return the adjectives that may be graded and negated."""
    return GOOD if sign > 0 else BAD


def _general(sign: int) -> tuple[str, ...]:
    return PRAISE if sign > 0 else BLAME


def _claims(subjects: list[str]) -> list[Sentence]:
    """Return one opinion each, without capital and full stop: "the pole is heavy"."""
    return [
        Sentence(f"{subject} is {word}", sign)
        for sign in SIGNS
        for subject in subjects
        for word in _general(sign) + _own(sign)
    ]


def _deeds(kind: Kind) -> list[Sentence]:
    """Return the thing's action without capital and full stop: "it laughs at the wind"."""
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
        for adverb in (GLAD if claim.sentiment > 0 else SAD)
    ]


def _graded(subjects: list[str]) -> list[Sentence]:
    """Return "The pole is very heavy." and "The pole is not heavy."."""
    changes = [(degree, +1) for degree in DEGREES] + [("not", -1)]
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
    """Return the writer's feeling about a part: "I cannot stand the zipper."."""
    return [
        Sentence(f"{feeling} the {part}.", sign)
        for sign in SIGNS
        for feeling in (LOVE if sign > 0 else HATE)
        for part in kind.parts
    ]


def _verdicts() -> list[Sentence]:
    return [Sentence(line, sign) for sign, lines in VERDICTS.items() for line in lines]
