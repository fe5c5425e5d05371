"""Single tokens as text: put together they are what the tokenizer decodes."""

from __future__ import annotations

import pytest

from rllib_llm.data.decoding import TokenTexts
from rllib_llm.runs.report_page import _tokenizer
from tests.conversations.templates import family_tokenizer

TEXT = "the sum is 12 and the tool is quick"


@pytest.mark.parametrize("family", ["mistral", "chatml"])
def test_tokens_together_are_the_text(family):
    tokenizer = family_tokenizer(family)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert "".join(TokenTexts(tokenizer).of(i)[0] for i in ids).strip() == TEXT


@pytest.mark.parametrize("family", ["mistral", "chatml"])
def test_the_report_shows_completions_with_their_spaces(tmp_path, family):
    """SentencePiece's mark of a space is no text, and decoding single tokens drops it."""
    tokenizer = family_tokenizer(family)
    tokenizer.save_pretrained(tmp_path / "model")
    texts = TokenTexts(_tokenizer(tmp_path))
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert "".join(texts.of(i)[0] for i in ids).strip() == TEXT
