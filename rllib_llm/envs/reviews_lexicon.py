"""The words of the reviews: six kinds of things, what is said of them, how a review ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of thing: its name, its parts (True = plural) and what only its reviews say."""

    name: str
    plural: bool
    parts: tuple[tuple[str, bool], ...]
    good: tuple[str, ...]  # adjectives that can be graded ("very ...") and negated ("not ...")
    bad: tuple[str, ...]
    delights: tuple[str, ...]  # what "it" or "they" did well, a verb phrase
    troubles: tuple[str, ...]


KINDS = (
    Kind(
        "coffee maker",
        False,
        (("lid", False), ("timer", False), ("filters", True)),
        ("sturdy", "quiet", "elegant", "clever"),
        ("flimsy", "noisy", "clumsy", "sticky"),
        ("brews in two minutes", "never spills a drop", "makes the whole house smell good"),
        ("leaks all over the floor", "burns every cup", "makes all my coffee taste of fish"),
    ),
    Kind(
        "headphones",
        True,
        (("cushions", True), ("cable", False), ("buttons", True)),
        ("comfortable", "light", "sturdy", "elegant"),
        ("itchy", "heavy", "flimsy", "noisy"),
        ("make every song shine", "last all day", "keep out the whole train"),
        ("hurt after one song", "fall off in the rain", "play every song twice"),
    ),
    Kind(
        "backpack",
        False,
        (("straps", True), ("zipper", False), ("pockets", True)),
        ("roomy", "sturdy", "comfortable", "clever"),
        ("flimsy", "heavy", "stiff", "clumsy"),
        ("fits under every seat", "keeps my books dry", "makes all the stairs feel flat"),
        ("soaks up all the rain", "smells of fish", "fell apart on the stairs"),
    ),
    Kind(
        "tent",
        False,
        (("poles", True), ("floor", False), ("zipper", False)),
        ("roomy", "light", "sturdy", "quiet"),
        ("leaky", "heavy", "flimsy", "stiff"),
        ("goes up in two minutes", "laughs at the wind", "keeps out every bug"),
        ("lets in all the rain", "fell over in the wind", "smells of wet dog"),
    ),
    Kind(
        "novel",
        False,
        (("plot", False), ("ending", False), ("jokes", True)),
        ("gripping", "clever", "funny", "touching"),
        ("dull", "clumsy", "silly", "flat"),
        ("kept me up all night", "made me laugh on the train", "gets better on every page"),
        ("put me to sleep twice", "gives away the ending", "gets lost on every page"),
    ),
    Kind(
        "running shoes",
        True,
        (("soles", True), ("laces", True), ("heels", True)),
        ("light", "comfortable", "sturdy", "bouncy"),
        ("heavy", "stiff", "itchy", "slippery"),
        ("fit like a dream", "make every hill feel flat", "dry in one night"),
        ("fell apart in one week", "squeak all day", "soak up all the rain"),
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
PRAISE = ("wonderful", "lovely", "superb", "brilliant", "perfect")
BLAME = ("awful", "terrible", "dreadful", "useless", "hopeless")
DEGREES = ("very", "really")
GLAD = ("Luckily", "Happily", "To my delight")
SAD = ("Sadly", "Worse", "To my horror")
LOVE = ("I love", "I adore", "I am proud of")
HATE = ("I hate", "I cannot stand", "I am sick of")

# {it}, {It}, {is}, {does} and {was} agree with the thing.
VERDICTS = {
    +1: (
        "Five stars.",
        "I would buy {it} again.",
        "{It} {is} worth every cent.",
        "Best gift of the year.",
        "My friends all want {it} now.",
    ),
    0: (
        "Three stars.",
        "{It} {does} the job.",
        "I have seen better and worse.",
        "You get what you pay for.",
    ),
    -1: (
        "One star.",
        "I sent {it} back.",
        "I want my money back.",
        "Not worth one cent.",
        "I gave {it} to my worst enemy.",
    ),
}
