"""Pairs from labelled rows, by hand."""

from __future__ import annotations

import json

import pytest

from rllib_llm.data.preferences import pairs_from_labels
from rllib_llm.data.sources import load_rows
from rllib_llm.shared.errors import Problems

ROWS = [
    {"text": "good 1", "label": 1},
    {"text": "bad 1", "label": 0},
    {"text": "good 2", "label": 1},
    {"text": "good 3", "label": 1},
    {"text": "bad 2", "label": 0},
]


def shout(text: str) -> str:
    return text.upper()


def test_chosen_has_the_higher_label():
    for pair in pairs_from_labels(ROWS, num_pairs=20):
        assert pair["chosen"].startswith("good") and pair["rejected"].startswith("bad")


def test_every_text_is_drawn_once_before_any_is_drawn_again():
    pairs = pairs_from_labels(ROWS, num_pairs=6)
    chosen, rejected = [p["chosen"] for p in pairs], [p["rejected"] for p in pairs]
    # 3 good texts: two epochs; 2 bad ones: three epochs.
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["good 1", "good 2", "good 3"]
    assert all(sorted(rejected[i : i + 2]) == ["bad 1", "bad 2"] for i in (0, 2, 4))


def test_without_a_number_the_commonest_label_is_drawn_once():
    assert sorted(p["chosen"] for p in pairs_from_labels(ROWS)) == ["good 1", "good 2", "good 3"]


def test_the_seed_decides():
    one, same, other = (pairs_from_labels(ROWS, num_pairs=12, seed=s) for s in (3, 3, 4))
    assert one == same
    assert one != other


def test_with_three_labels_every_two_take_turns():
    stars = [{"review": f"{n} stars", "stars": n} for n in (1, 3, 5)]
    pairs = pairs_from_labels(stars, text_column="review", label_column="stars")
    # 3 pairs of labels in turn, each label in two of them: no text is drawn more often than that.
    assert [(p["rejected"], p["chosen"]) for p in pairs] == [
        ("1 stars", "3 stars"),
        ("1 stars", "5 stars"),
        ("3 stars", "5 stars"),
    ]


def test_texts_are_rewritten_by_a_function_or_its_path():
    by_function = pairs_from_labels(ROWS, rewrite=shout)
    assert by_function[0]["chosen"].startswith("GOOD")
    assert pairs_from_labels(ROWS, rewrite=f"{__name__}.shout") == by_function


def test_as_a_data_source_of_a_stage(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {
        "path": "rllib_llm.data.preferences.pairs_from_labels",
        "kwargs": {"path": str(file), "num_pairs": 4},
    }
    rows = load_rows(source)
    assert len(rows) == 4
    assert rows.columns == ["chosen", "rejected"]


def test_labels_that_cannot_be_compared_are_named():
    with pytest.raises(Problems, match="row 0 of .*: label='positive' must be a finite numb"):
        pairs_from_labels([{"text": "fine", "label": "positive"}])
    with pytest.raises(Problems, match="at least two different labels: all 1 rows have .1.0"):
        pairs_from_labels([{"text": "fine", "label": 1}])
    with pytest.raises(Problems, match="row 0 of .*: text=None must be text"):
        pairs_from_labels([{"text": None, "label": 1}])
    with pytest.raises(Problems, match="Did you mean 'label'"):
        pairs_from_labels(ROWS, label_column="labels")
    with pytest.raises(ValueError, match="num_pairs=0 must be at least 1"):
        pairs_from_labels(ROWS, num_pairs=0)
