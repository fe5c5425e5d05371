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
    Kind("coffee maker", ("lid", "timer", "filter"),
         ("brews in two minutes", "never spills a drop"), ("leaks all over", "burns every cup")),
    Kind("guitar", ("neck", "bridge", "case"),
         ("stays in tune", "makes every song shine"), ("falls out of tune", "scares the cat")),
    Kind("backpack", ("strap", "zipper", "pocket"),
         ("fits under every seat", "keeps out the rain"),
         ("smells of fish", "fell apart in one week")),
    Kind("tent", ("pole", "floor", "roof"),
         ("goes up in ten seconds", "laughs at the wind"),
         ("lets in the bugs", "smells of wet dog")),
    Kind("novel", ("plot", "ending", "cover"),
         ("kept me up all night", "made me laugh on the train"),
         ("put me to sleep", "gives away the murderer")),
    Kind("bicycle", ("saddle", "bell", "chain"),
         ("climbs every hill", "turns on a coin"), ("squeaks all day", "goes nowhere fast")),
)  # fmt: skip

# The opening of a review: a head, which names the thing, and a tail.
OWNERS = ("aunt", "uncle", "boss", "sister", "brother", "neighbor", "cousin", "dentist")
HEADS = (
    *(f"My {owner} {verb} me {{this}}" for owner in OWNERS for verb in ("gave", "bought")),
    *(f"{who} {verb} {{this}}" for who in ("I", "We") for verb in ("bought", "ordered", "won")),
    "{This} arrived",
    "{This} came",
)
TAILS = (
    "last week", "in June", "on a whim", "by mistake", "two months ago", "after a long wait",
    "for my birthday", "in a huge box",
)  # fmt: skip

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
GENERAL, OWN = {+1: PRAISE, -1: BLAME}, {+1: GOOD, -1: BAD}
ADVERBS, FEELINGS = {+1: GLAD, -1: SAD}, {+1: LOVE, -1: HATE}

VERDICTS = {
    +1: ("Five stars.", "I would buy it again.", "It is worth every cent.",
         "My friends all want it now."),
    0: ("Three stars.", "It does the job.", "You get what you pay for."),
    -1: ("One star.", "I sent it back.", "I want my money back.", "I gave it to my worst enemy."),
}  # fmt: skip

FORM_WEIGHTS = (3, 5, 2, 2)  # of the forms of body, in the order of `tables`
Sentence = tuple[str, int]
"""A sentence and the sum of its opinions."""


@dataclass(frozen=True)
class Table:
    """Sentences of one role in a review: in forms to draw from, and by text to look up.

    `forms` holds the sentences of each form by the sign of their sentiment.
    """

    forms: list[dict[int, list[str]]]
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
    done = {+1: kind.delights, -1: kind.troubles}
    deeds = [(f"it {deed}", sign) for sign in done for deed in done[sign]]
    feelings = [
        (f"{feeling} the {part}.", sign)
        for sign in FEELINGS
        for feeling in FEELINGS[sign]
        for part in kind.parts
    ]
    verdicts = [(line, sign) for sign, lines in VERDICTS.items() for line in lines]
    parts = [f"the {part}" for part in kind.parts]
    return Tables(
        _table(*_said_of(["it"], deeds), _stated(deeds)),
        _table(*_said_of(parts, []), feelings),
        _table(verdicts),
    )


def _table(*forms: list[Sentence]) -> Table:
    by_sign: list[dict[int, list[str]]] = [{} for _ in forms]
    for groups, sentences in zip(by_sign, forms, strict=True):
        for text, sentiment in sentences:
            sign = (sentiment > 0) - (sentiment < 0)
            groups.setdefault(sign, []).append(text)
    return Table(by_sign, {text: sentiment for form in forms for text, sentiment in form})


def _said_of(subjects: list[str], deeds: list[Sentence]) -> list[list[Sentence]]:
    """Return the forms of opinions on subjects: one opinion, two, and one after an adverb."""
    claims = [
        (f"{subject} is {word}", sign)
        for sign in OWN
        for subject in subjects
        for word in GENERAL[sign] + OWN[sign]
    ]
    graded = [
        (f"{subject} is {change} {word}", sign * turn)
        for sign in OWN
        for subject in subjects
        for change, turn in (*((degree, +1) for degree in DEGREES), ("not", -1))
        for word in OWN[sign]
    ]
    pairs = [
        (f"{subject} is {general} {'and' if first == second else 'but'} {own}", first + second)
        for first in GENERAL
        for second in OWN
        for subject in subjects
        for general in GENERAL[first]
        for own in OWN[second]
    ]
    exclaimed = [
        (f"{adverb}, {text}.", sign) for text, sign in claims + deeds for adverb in ADVERBS[sign]
    ]
    return [_stated(claims + graded), _stated(pairs), exclaimed]


def _stated(claims: list[Sentence]) -> list[Sentence]:
    """Return the claims as sentences of their own, "It is heavy." of "it is heavy"."""
    return [(f"{text[0].upper()}{text[1:]}.", sentiment) for text, sentiment in claims]
