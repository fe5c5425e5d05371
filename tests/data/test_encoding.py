"""Ids of texts, and which of them lie in a part of the text."""

from __future__ import annotations

import gc
import weakref

import pytest

from rllib_llm.data.encoding import (
    common_prefix_len,
    encode_ended,
    encode_spans,
    encode_text,
    keep_end,
    render_chat,
)
from tests.tiny_models import byte_tokenizer, sentencepiece_tokenizer


class Slow:
    """A tokenizer that knows no offsets."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.cls_token, self.convert_tokens_to_ids = None, tokenizer.convert_tokens_to_ids

    def __call__(self, text, add_special_tokens=True):
        return self._tokenizer(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("prompt, completion", [("the cat", " cat."), ("", "4"), ("2+2=", "4")])
def test_without_offsets_the_border_is_the_same(make, prompt, completion):
    tokenizer = make()
    ids, border = encode_ended(tokenizer, prompt, completion)
    assert encode_ended(Slow(tokenizer), prompt, completion) == (ids, border)
    assert tokenizer.decode(ids[border:]).strip() == f"{completion.strip()}</s>"


def test_a_token_that_reaches_out_of_its_span_is_not_inside():
    # The tokens of "4 42 2": "4", "\u2581", "42", "\u2581", "2".
    tokenizer = sentencepiece_tokenizer()
    ids, inside = encode_spans(tokenizer, "4 42 2", [(2, 3), (5, 6)], add_special_tokens=False)
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == [
        "\u2581", "4", "\u2581", "42", "\u2581", "2"
    ]  # fmt: skip
    assert inside == [False, False, False, False, False, True]


def test_common_prefix_len():
    assert common_prefix_len([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix_len([1, 2], [1, 2, 4]) == 2
    assert common_prefix_len([], [1]) == 0


@pytest.mark.parametrize("kind", [lambda tokenizer: tokenizer, Slow])
def test_one_bos_whatever_the_text_begins_with(kind):
    """The tokenizer adds <s>; a rendered chat in a column of texts has it already."""
    tokenizer = kind(byte_tokenizer())
    plain = encode_ended(tokenizer, "a", "b")
    assert plain[0].count(tokenizer.bos_token_id) == 1
    with pytest.warns(UserWarning, match="begins with <s>, and the tokenizer adds one: one is"):
        assert encode_ended(tokenizer, "<s>a", "b") == plain
    with pytest.warns(UserWarning, match="one is kept"):
        assert encode_text(tokenizer, "<s>a") == encode_text(tokenizer, "a")
    with pytest.warns(UserWarning, match="one is kept"):
        ids, inside = encode_spans(tokenizer, "<s>ab", [(4, 5)], add_special_tokens=True)
    assert inside == [False, False, True] and ids == encode_text(tokenizer, "ab")


def test_one_eos_whatever_the_text_ends_with():
    tokenizer = byte_tokenizer()
    plain, _ = encode_ended(tokenizer, "a", "b")
    assert encode_ended(tokenizer, "a", "b</s>")[0] == plain
    assert encode_ended(tokenizer, "a", "")[1] == 2  # an empty completion is its EOS


def test_keep_end():
    assert keep_end([1, 5, 6, 7], 2, (1, None)) == [1, 7]
    assert keep_end([4, 5, 6, 7], 2, (1, None)) == [6, 7]
    assert keep_end([1, 5, 6, 7], 1, (1,)) == [7]  # a BOS alone would say nothing
    assert keep_end([1, 5], 2, (1,)) == [1, 5]


def test_what_is_known_of_a_template_keeps_no_tokenizer_alive():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    known = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert known() is None
