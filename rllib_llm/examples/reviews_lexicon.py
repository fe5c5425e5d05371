"""The words of the reviews: six kinds of things, what is said of them, how a review ends."""

from __future__ import annotations

from dataclasses import dataclass


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
