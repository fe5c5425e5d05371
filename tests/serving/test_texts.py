"""Text as it comes: whole characters, nothing that a stop text takes back, all of it at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.data.decoding import TextStream, TokenTexts
from tests.envs.tiny_tokenizers import word_tokenizer
from tests.tiny_models import byte_tokenizer, sentencepiece_tokenizer

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()


def streamed(tokenizer, ids, **settings) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, **settings)
    parts = []
    for token in ids:
        parts.append(stream.push(token))
        if stream.stopped_by is not None:
            return parts, stream
    return [*parts, stream.finish()], stream


def ids_of(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_the_parts_of_any_text_are_the_text_and_hold_whole_characters(text):
    parts, stream = streamed(BYTES, ids_of(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)
    assert stream.length == len(text)


@pytest.mark.parametrize("least", range(5))
def test_stop_texts_within_the_first_tokens_are_passed_over(least):
    """As vLLM does: `abab` ends at the first `b` that is sampled behind `min_tokens` tokens."""
    parts, stream = streamed(BYTES, ids_of("abab"), stops=["b"], min_tokens=least)
    assert "".join(parts) == ["a", "a", "aba", "aba", "abab"][least]
    assert stream.stopped_by == (None if least == 4 else "b")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé€😀", max_size=30),
    stops=st.lists(st.text(alphabet="abé€😀", min_size=1, max_size=4), min_size=1, max_size=3),
    keeps=st.booleans(),
)
def test_a_stop_text_ends_the_text_wherever_its_tokens_begin(text, stops, keeps):
    # Each of these characters but a and b is several tokens.
    parts, stream = streamed(BYTES, ids_of(text), stops=stops, keeps_stop=keeps)
    # The first stop text that is whole when the text is read character by character.
    ends = [i for i in range(1, len(text) + 1) if any(stop in text[:i] for stop in stops)]
    if not ends:
        assert "".join(parts) == text and stream.stopped_by is None
        return
    so_far = text[: ends[0]]
    start = min(so_far.find(stop) for stop in stops if stop in so_far)
    assert stream.stopped_by in stops
    assert "".join(parts) == (so_far[: start + len(stream.stopped_by)] if keeps else so_far[:start])


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(4, 259), max_size=60))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_writes_them(ids):
    parts, _ = streamed(BYTES, ids)
    assert "".join(parts) == BYTES.decode(ids)


def test_a_completion_goes_on_with_its_prompt_s_text():
    prompt, rest = PIECES("the cat", add_special_tokens=False)["input_ids"][:1], "\u2581cat"
    (token,) = PIECES.convert_tokens_to_ids([rest])
    assert "".join(streamed(PIECES, [token], before=prompt)[0]) == " cat"


def test_special_tokens_take_no_space_away():
    tokenizer = word_tokenizer(chat=True)
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    special = tokenizer.all_special_ids[0]
    assert "".join(streamed(tokenizer, [ids[0], special, special, *ids[1:]])[0]) == "the cat"


@pytest.mark.parametrize(
    ("token", "text", "raw"),
    [("\u2581the", " the", [32, 116, 104, 101]), ("<s>", "<s>", [60, 115, 62])],
)
def test_tokens_have_a_text_and_bytes(token, text, raw):
    assert TokenTexts(PIECES).of(PIECES.convert_tokens_to_ids(token)) == (text, raw)


def test_a_part_of_a_character_has_its_own_byte():
    texts = TokenTexts(BYTES)
    found = [texts.of(token) for token in ids_of("é")]
    assert [raw for _, raw in found] == [[0xC3], [0xA9]] and found[0][0] == "\ufffd"
