from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import pytest

from rllib_llm.examples import reviews_grammar as grammar
from rllib_llm.examples import reviews_sentences as words
from rllib_llm.examples.reviews_grammar import ReviewGrade, judge
from rllib_llm.examples.reviews_sentences import KINDS, tables


def whole(row, completion="completion"):
    return row["prompt"] + row[completion]


# Opinions are counted by hand in the comments.
REVIEWS = [
    # +1 +1 (lovely, light), +1, verdict +1: 4, cut to 3
    ("We won this tent by mistake. It is lovely and light. I adore the pole. Five stars.", 3),
    # +1 -1 (lovely, heavy), -1 (not light), 0
    ("I won this tent in June. It is lovely but heavy. The roof is not light. Three stars.", -1),
    # +1 (not flimsy), +1, -1, 0
    (
        "This backpack arrived on a whim. It is not flimsy. The strap is really sturdy. "
        "Worse, it smells of fish. It does the job.",
        1,
    ),
    # -1 -1 (awful, itchy), -1, verdict -1: -4, cut to -3
    (
        "My boss gave me this guitar last week. It is awful and itchy. "
        "To my horror, the neck is flimsy. I sent it back.",
        -3,
    ),
    # +1, -1, verdict +1
    (
        "My dentist bought me this novel for my birthday. Luckily, it kept me up all night. "
        "I am sick of the plot. It is worth every cent.",
        1,
    ),
]

OPENING = "We won this tent by mistake."
NO_REVIEWS = {
    "empty": "",
    "a prompt alone": OPENING,
    "other English": "The weather is nice today, and I am going for a walk.",
    "no verdict": f"{OPENING} It is lovely and light. I adore the pole.",
    "no part": f"{OPENING} It is lovely and light. Five stars.",
    "part before thing": f"{OPENING} I adore the pole. It is light. Five stars.",
    "four bodies": f"{OPENING} It is lovely. I adore the pole. It is light. I love the roof. "
    "Five stars.",
    "said twice": f"{OPENING} It is light. I adore the pole. It is light. Five stars.",
    "two verdicts": f"{OPENING} It is light. I adore the pole. Five stars. Five stars.",
    "opening twice": f"{OPENING} {OPENING} It is light. I adore the pole. Five stars.",
    "part of another kind": f"{OPENING} It is light. I adore the bell. Five stars.",
    "deed of another kind": f"{OPENING} It burns every cup. I adore the pole. Five stars.",
    "no kind at all": "We won this banana by mistake. It is light. I adore the pole. Five stars.",
    "and joins two polarities": f"{OPENING} It is lovely and heavy. I adore the pole. Five stars.",
    "but joins one polarity": f"{OPENING} It is lovely but light. I adore the pole. Five stars.",
    "glad of something bad": f"{OPENING} Luckily, it is heavy. I adore the pole. Five stars.",
    "sad for something good": f"{OPENING} Sadly, it is light. I adore the pole. Five stars.",
    "praise is not graded": f"{OPENING} It is very lovely. I adore the pole. Five stars.",
    "no capital": f"{OPENING} it is light. I adore the pole. Five stars.",
    "no full stop": f"{OPENING} It is light. I adore the pole. Five stars",
    "two spaces": f"{OPENING}  It is light. I adore the pole. Five stars.",
    "something after it": f"{OPENING} It is light. I adore the pole. Five stars. And",
}


@pytest.mark.parametrize(("text", "sentiment"), REVIEWS)
def test_the_judge_counts_opinions(text, sentiment):
    assert judge(text) == ReviewGrade(grammatical=True, sentiment=sentiment)
    assert judge(text).score == sentiment


@pytest.mark.parametrize("text", NO_REVIEWS.values(), ids=NO_REVIEWS)
def test_the_judge_refuses_what_is_no_review(text):
    assert not judge(text).grammatical
    assert judge(text).score == grammar.UNGRAMMATICAL_SCORE


@pytest.mark.parametrize(
    ("name", "sentiment"),
    [
        ("part of another kind", 3),  # light +1, adore +1, five stars +1: each is a sentence
        ("and joins two polarities", 2),  # "lovely and heavy" is none: adore +1, five stars +1
        ("no full stop", 2),  # "Five stars" without its full stop is none
    ],
)
def test_the_sentiment_counts_what_is_said_in_whole_sentences(name, sentiment):
    assert judge(NO_REVIEWS[name]).sentiment == sentiment


def test_white_space_around_a_review_does_not_count():
    text, sentiment = REVIEWS[0]
    assert judge(f"\n {text} ") == ReviewGrade(grammatical=True, sentiment=sentiment)


def test_every_generated_text_is_a_review():
    rows = grammar.sft_texts(3000, seed=1) + grammar.sft_texts(500, seed=1, split="eval")
    assert all(judge(whole(row)).grammatical for row in rows)
    assert all(judge(row["text"]).grammatical for row in grammar.pretraining_texts(500))
    sentiments = [judge(whole(row)).sentiment for row in rows]
    assert set(sentiments) == set(range(-3, 4))
    assert abs(sum(sentiments) / len(sentiments)) < 0.15  # praise and blame are symmetric


def test_every_sentence_of_the_tables_can_stand_in_a_review():
    for kind in KINDS:
        table = tables(kind)
        opening = next(o.text for o in grammar.openings() if o.kind == kind and o.tail)
        roles = [table.of_thing, table.of_part, table.verdicts]
        plain = [next(iter(role.sentiments)) for role in roles]
        for place, role in enumerate(roles):
            for text in role.sentiments:
                said = [*plain[:place], text, *plain[place + 1 :]]
                assert judge(" ".join([opening, *said])).grammatical


def any_of(choices):
    return "(?:" + "|".join(map(re.escape, choices)) + ")"


def capital(text):
    return text[0].upper() + text[1:]


def clauses(subjects, deeds):
    """Expressions of the sentences about `subjects`, from the description of the language."""
    general, own = {1: words.PRAISE, -1: words.BLAME}, {1: words.GOOD, -1: words.BAD}
    adverbs = {1: words.GLAD, -1: words.SAD}
    low, high = any_of(subjects), any_of(map(capital, subjects))
    for sign in (1, -1):
        yield f"{high} is {any_of(general[sign] + own[sign])}"
        yield f"{high} is {any_of([*words.DEGREES, 'not'])} {any_of(own[sign])}"
        yield f"{high} is {any_of(general[sign])} and {any_of(own[sign])}"
        yield f"{high} is {any_of(general[sign])} but {any_of(own[-sign])}"
        yield f"{any_of(adverbs[sign])}, {low} is {any_of(general[sign] + own[sign])}"
        if deeds:
            yield f"It {any_of(deeds[sign])}"
            yield f"{any_of(adverbs[sign])}, it {any_of(deeds[sign])}"


def review_expression(kind):
    names = {"this": f"this {kind.name}", "This": f"This {kind.name}"}
    opening = f"{any_of(head.format(**names) for head in words.HEADS)} {any_of(words.TAILS)}"
    of_thing = "|".join(clauses(["it"], {1: kind.delights, -1: kind.troubles}))
    feelings = f"{any_of(words.LOVE + words.HATE)} the {any_of(kind.parts)}"
    of_part = "|".join([*clauses([f"the {part}" for part in kind.parts], None), feelings])
    verdict = any_of(line for lines in words.VERDICTS.values() for line in lines)
    bodies = rf"(?P<first>{of_thing})\. (?:{of_part})\.(?: (?P<last>{of_thing})\.)?"
    return re.compile(rf"{opening}\. {bodies} {verdict}")


EXPRESSIONS = [review_expression(kind) for kind in KINDS]


def is_described(text):
    """Whether the description of the language, without its tables, has this text."""
    matches = [expression.fullmatch(text) for expression in EXPRESSIONS]
    return any(match and match["first"] != match["last"] for match in matches)


def test_the_judge_agrees_with_the_description_of_the_language():
    rng = random.Random(0)
    for row in grammar.sft_texts(300, seed=2):
        assert is_described(whole(row))
        # One fault each, which may by chance give another review: "It is heavy." for "light".
        fault = rng.choice(grammar.FAULTS)
        text = row["prompt"] + " " + grammar.faulty(row["completion"].strip(), fault, rng)
        assert judge(text).grammatical == is_described(text), text


def test_no_character_of_a_review_can_be_dropped():
    text = REVIEWS[0][0]
    for place in range(len(text)):
        assert not judge(text[:place] + text[place + 1 :]).grammatical


@pytest.mark.parametrize("fault", grammar.FAULTS)
def test_each_fault_makes_reviews_ungrammatical(fault):
    rng = random.Random(0)
    rows = grammar.sft_texts(200, seed=3)
    texts = [
        row["prompt"] + " " + grammar.faulty(row["completion"].strip(), fault, rng) for row in rows
    ]
    assert sum(not judge(text).grammatical for text in texts) > 100  # most faults are faults


def test_spoilt_completions_are_never_grammatical():
    rng = random.Random(0)
    for row in grammar.sft_texts(200, seed=4):
        spoilt = grammar.spoil(row["prompt"], row["completion"], rng)
        assert spoilt.startswith(" ")
        assert not judge(row["prompt"] + spoilt).grammatical


def test_data_is_a_function_of_its_arguments():
    assert grammar.sft_texts(50, seed=5) == grammar.sft_texts(50, seed=5)
    assert grammar.sft_texts(50, seed=5) == grammar.sft_texts(60, seed=5)[:50]
    assert grammar.sft_texts(50, seed=5) != grammar.sft_texts(50, seed=6)
    assert grammar.preference_pairs(50, seed=5) == grammar.preference_pairs(50, seed=5)
    assert grammar.pretraining_texts(50) == grammar.pretraining_texts(50)


@pytest.mark.slow
def test_data_is_the_same_in_every_process():
    program = (
        "from rllib_llm.examples.reviews_grammar import *; "
        "print(repr((sft_texts(20), pretraining_texts(20), preference_pairs(20), prompts()[:20])))"
    )
    here = (
        grammar.sft_texts(20),
        grammar.pretraining_texts(20),
        grammar.preference_pairs(20),
        grammar.prompts()[:20],
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}  # another order of sets
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip().splitlines()[-1] == repr(here)


def test_held_out_openings_are_not_trained_on():
    train = {opening.head for opening in grammar.openings("train")}
    held_out = {opening.head for opening in grammar.openings("eval")}
    assert not train & held_out
    assert len(train) == 126 and len(held_out) == 18  # 6 kinds x 24 heads, one in 8 held out
    assert {opening.kind for opening in grammar.openings("eval")} == set(KINDS)
    prompts = [row["prompt"] for row in grammar.prompts("eval")]
    assert len(prompts) == len(set(prompts)) == 18 * (1 + 8)  # the head alone, or with a tail
    trained = [row["prompt"] for row in grammar.sft_texts(2000)]
    assert not any(text.startswith(tuple(held_out)) for text in trained)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"split='test' must be one of \('train', 'eval'\)"):
        grammar.prompts("test")


def test_completions_are_varied():
    completions = [row["completion"] for row in grammar.sft_texts(2000)]
    assert len(set(completions)) > 1950
    best = [r["completion"] for r in grammar.sft_texts(4000) if judge(whole(r)).sentiment == 3]
    assert len(set(best)) > 0.97 * len(best)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.25])
def test_pairs_have_exactly_the_noise_asked_for(noise):
    pairs = grammar.preference_pairs(400, seed=7, noise=noise)
    gaps = [judge(whole(p, "chosen")).score - judge(whole(p, "rejected")).score for p in pairs]
    assert 0.0 not in gaps
    assert sum(gap < 0 for gap in gaps) == round(400 * noise)


def test_a_share_of_the_pairs_has_a_fault():
    pairs = grammar.preference_pairs(800, seed=8, noise=0.0, spoilt=0.25)
    faulty = [p for p in pairs if not judge(whole(p, "rejected")).grammatical]
    assert all(judge(whole(p, "chosen")).grammatical for p in pairs)
    # 800 draws of chance 1/4: mean 200, standard deviation sqrt(800 * 3/16) = 12
    assert abs(len(faulty) - 200) < 4 * 12.3
    clean = grammar.preference_pairs(100, seed=8, spoilt=0.0)
    assert all(judge(whole(p, name)).grammatical for p in clean for name in ("chosen", "rejected"))
