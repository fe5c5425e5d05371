"""Product reviews of mixed sentiment: a generator, an exact judge, and the data drawn from them.

    review  = opening of_thing of_part [of_thing] verdict    all about one kind of thing
    opening = head tail "."                                  "My aunt gave me this tent in June."
    of_thing, of_part                                        "It is lovely but heavy."
    verdict                                                  "I gave it to my worst enemy."

What may be said of the thing and of its parts is in `reviews_sentences`, spelt out as finite
tables; nothing is said twice. The generator draws from these tables and the judge looks up in them,
so the two cannot disagree about the language.

The sentiment of a review is the sum of its opinions, +1 or -1 each, cut to -3..+3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from rllib_llm.examples.reviews_sentences import (
    FORM_WEIGHTS,
    HEADS,
    KINDS,
    TAILS,
    Kind,
    Table,
    tables,
)
from rllib_llm.shared.errors import require

UNGRAMMATICAL_SCORE = -3.0
MOODS = (0.05, 0.5, 0.95)  # a writer's chance of a good opinion, one mood for a whole review
NUM_BODIES = (2, 2, 3)  # equally likely
NEUTRAL_SHARE = 0.1  # of verdicts, and of sentences that can be neutral
HELD_OUT = 8  # of the heads of openings, one in so many is kept for evaluation
SPLITS = ("train", "eval")


@dataclass(frozen=True)
class ReviewGrade:
    """The exact judge's result for a text."""

    grammatical: bool
    sentiment: int  # -3..+3, of the sentences that belong to the language, wherever they stand

    @property
    def score(self) -> float:
        """The preferred score, -3 to 3: a review's sentiment; ungrammatical text scores least."""
        return float(self.sentiment) if self.grammatical else UNGRAMMATICAL_SCORE


@dataclass(frozen=True)
class Opening:
    """The beginning of a review: a head alone ("I won this tent") or a whole first sentence."""

    kind: Kind
    head: str
    tail: str | None

    @property
    def text(self) -> str:
        """The prompt as the policy reads it; what follows begins with a space."""
        return self.head if self.tail is None else f"{self.head} {self.tail}."


@lru_cache(maxsize=len(SPLITS))
def openings(split: str = "train") -> tuple[Opening, ...]:
    """Return the openings of a split, in a fixed order; no head is in both splits.

    Raises:
        Problems: `split` is neither "train" nor "eval".
    """
    require(split in SPLITS, "split", split, f"be one of {SPLITS}", "", "")
    return tuple(
        Opening(kind, head, tail)
        for shift, kind in enumerate(KINDS)
        for place, head in enumerate(head.format(this=f"this {kind.name}",
                                                 This=f"This {kind.name}") for head in HEADS)
        if ((place + shift) % HELD_OUT == 0) == (split == "eval")
        for tail in (None, *TAILS)
    )


@lru_cache(maxsize=1)
def _kind_of_first_sentence() -> dict[str, Kind]:
    both = (opening for split in SPLITS for opening in openings(split))
    return {opening.text: opening.kind for opening in both if opening.tail is not None}


def complete(opening: Opening, rng: random.Random) -> str:
    """Return the rest of a review that begins so: " on a whim. It is light. ... Five stars."."""
    table = tables(opening.kind)
    mood = rng.choice(MOODS)
    said = [] if opening.tail else [f"{rng.choice(TAILS)}."]
    for role in (table.of_thing, table.of_part, table.of_thing)[: rng.choice(NUM_BODIES)]:
        body = _draw(role, mood, rng)
        while body in said:
            body = _draw(role, mood, rng)
        said.append(body)
    return " " + " ".join([*said, _draw(table.verdicts, mood, rng)])


def _draw(table: Table, mood: float, rng: random.Random) -> str:
    (form,) = rng.choices(table.forms, weights=FORM_WEIGHTS[: len(table.forms)])
    if 0 in form and rng.random() < NEUTRAL_SHARE:
        return rng.choice(form[0])
    return rng.choice(form[+1 if rng.random() < mood else -1])


def judge(text: str) -> ReviewGrade:
    """Return whether `text` is a review of the language, and its sentiment.

    Every character counts, but for white space before and after the text. Never raises.
    """
    first, *said = _sentences(text)
    opinions = sum(_opinions().get(sentence, 0) for sentence in said)
    kind, is_review = _kind_of_first_sentence().get(first), False
    if kind is not None and len(said) - 1 in NUM_BODIES and len(set(said)) == len(said):
        table = tables(kind)
        roles = [*(table.of_thing, table.of_part, table.of_thing)[: len(said) - 1], table.verdicts]
        is_review = all(one in role.sentiments for role, one in zip(roles, said, strict=True))
    return ReviewGrade(is_review, sentiment=max(-3, min(3, opinions)))


@lru_cache(maxsize=1)
def _opinions() -> dict[str, int]:
    """Return the sentiment of every sentence of the language; it is the same in all reviews."""
    roles = (role for kind in KINDS for role in vars(tables(kind)).values())
    return {text: sentiment for role in roles for text, sentiment in role.sentiments.items()}


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) ", text.strip())


# --- what goes wrong in a text that is no review -----------------------------------------------


Split = Callable[[str], list[str]]
FAULTS: tuple[tuple[Split, str], ...] = (
    *((lambda text: text.split(" "), change) for change in ("drop", "double", "swap", "borrow")),
    *((_sentences, change) for change in ("drop", "repeat", "borrow")),
)


def faulty(text: str, fault: tuple[Split, str], rng: random.Random) -> str:
    """Return the text with one of `FAULTS`."""
    split, change = fault
    parts = split(text)
    if change == "borrow":
        borrowed = rng.choice(split(complete(rng.choice(openings()), rng)))
        parts[rng.randrange(len(parts))] = borrowed
        return " ".join(parts)
    place = rng.randrange(len(parts) - (change == "swap"))
    if change == "drop":
        del parts[place]
    elif change == "swap":
        parts[place : place + 2] = reversed(parts[place : place + 2])
    else:
        parts.insert(place, rng.choice(parts) if change == "repeat" else parts[place])
    return " ".join(parts)


def spoil(opening: str, completion: str, rng: random.Random) -> str:
    """Return the completion with one error that makes it ungrammatical."""
    while True:
        spoilt = " " + faulty(completion.strip(), rng.choice(FAULTS), rng)
        if not judge(opening + spoilt).grammatical:
            return spoilt


# --- data, by dotted path from a configuration -------------------------------------------------


def prompts(split: str = "train") -> list[dict[str, str]]:
    """Return {"prompt"} rows: the openings of a split."""
    return [{"prompt": opening.text} for opening in openings(split)]


def sft_texts(n: int = 8000, seed: int = 0, split: str = "train") -> list[dict[str, str]]:
    """Return n {"prompt", "completion"} rows of mixed sentiment, all grammatical."""
    rng = random.Random(f"sft {split} {seed}")
    choices = openings(split)
    drawn = (rng.choice(choices) for _ in range(n))
    return [{"prompt": opening.text, "completion": complete(opening, rng)} for opening in drawn]


def pretraining_texts(n: int = 8000, seed: int = 0) -> list[dict[str, str]]:
    """Return n {"text"} rows: whole reviews, other ones than the `sft_texts` of the same seed."""
    rng = random.Random(f"pretraining {seed}")
    choices = openings("train")
    drawn = (rng.choice(choices) for _ in range(n))
    return [{"text": opening.text + complete(opening, rng)} for opening in drawn]


def preference_pairs(
    n: int = 4000, seed: int = 0, split: str = "train", noise: float = 0.1, spoilt: float = 0.1,
    min_gap: float = 2.0,
) -> list[dict[str, str]]:  # fmt: skip
    """Return n {"prompt", "chosen", "rejected"} rows: two completions of one opening.

    The one of higher gold score is chosen (they are at least `min_gap` apart, as comparisons of
    people are), except in exactly round(noise * n) rows, whose labels are the wrong way round. In
    a share `spoilt` of the rows (each with this chance) one completion has a fault and is no review
    any more.
    """
    rng = random.Random(f"pairs {split} {seed}")
    choices = openings(split)
    rows = [_pair(rng.choice(choices), rng.random() < spoilt, min_gap, rng) for _ in range(n)]
    for place in rng.sample(range(n), round(noise * n)):
        row = rows[place]
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return rows


def _pair(opening: Opening, with_fault: bool, min_gap: float, rng: random.Random) -> dict[str, str]:
    text = opening.text
    while True:
        one, other = complete(opening, rng), complete(opening, rng)
        if with_fault:
            other = spoil(text, other, rng)
        scores = judge(text + one).score, judge(text + other).score
        if abs(scores[0] - scores[1]) >= max(min_gap, 1):
            chosen, rejected = (one, other) if scores[0] > scores[1] else (other, one)
            return {"prompt": text, "chosen": chosen, "rejected": rejected}
