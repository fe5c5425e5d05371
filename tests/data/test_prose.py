"""Tokenised text put back together."""

from __future__ import annotations

import pytest

from rllib_llm.data.prose import as_prose


@pytest.mark.parametrize(
    ("tokens", "prose"),
    [
        ("it 's a joy , and you wo n't regret it .", "It's a joy, and you won't regret it."),
        ("one long string of cliches .", "One long string of cliches."),
        ("`` big '' -lrb- and -rrb- bold : yes !", '"big" (and) bold: yes!'),
        ("the actors ' faces ; they 've lived", "The actors' faces; they've lived"),
        ("no . no yuks .", "No. No yuks."),
        ("a rock 'n' roll film", "A rock 'n' roll film"),
        ("Already prose, isn't it?", "Already prose, isn't it?"),
    ],
)
def test_as_prose(tokens, prose):
    assert as_prose(tokens) == prose
