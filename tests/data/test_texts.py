"""Texts as token batches: which tokens are targets, EOS at the end of every text."""

from __future__ import annotations

import warnings

import pytest
import torch

from rllib_llm.data.preferences import PairSource
from rllib_llm.data.texts import TextSource
from rllib_llm.modules.logprobs import text_logprobs
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import build_model
from tests.tiny_models import ENCODER_SPECIALS, byte_tokenizer, llama, sentencepiece_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}U:{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "ok"}, {"role": "assistant", "content": "bye"},
]  # fmt: skip

SENTENCEPIECE_ROWS = [
    {"prompt": "2+2=", "completion": "4"}, {"prompt": "the cat", "completion": " the cat."},
    {"prompt": "4", "completion": "2+1=43"}, {"prompt": "the ", "completion": "cat"},
]  # fmt: skip
TEXT_COLUMNS = (columns.INPUT_IDS, columns.ATTENTION_MASK, columns.LOSS_MASK)


@pytest.fixture(scope="module")
def tokenizer():
    return build_model()[1]


def targets(tokenizer, rows, **settings):
    """The text of each row's target tokens."""
    source = TextSource(rows, tokenizer=tokenizer, max_length=64, shuffle=False, **settings)
    batch = source.batch(0, len(rows))
    return [
        tokenizer.decode(ids[keep])
        for ids, keep in zip(batch[columns.INPUT_IDS], batch[columns.LOSS_MASK], strict=True)
    ]


def test_only_the_completion_and_its_eos_are_targets(tokenizer):
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "10+20=", "completion": "30"}]
    assert targets(tokenizer, rows) == ["3<eos>", "30<eos>"]
    # The first token of a text is predicted by nothing.
    assert targets(tokenizer, rows, loss_on="all") == ["+2=3<eos>", "0+20=30<eos>"]


def test_a_plain_text_is_all_target(tokenizer):
    assert targets(tokenizer, [{"text": "1+1=2"}]) == ["+1=2<eos>"]


def test_rows_are_padded_on_the_right_and_padding_is_no_target(tokenizer):
    rows = [{"prompt": "1=", "completion": "1"}, {"prompt": "1=", "completion": "111"}]
    source = TextSource(rows, tokenizer=tokenizer, max_length=64, shuffle=False)
    batch = source.batch(0, 2)
    one, equals = tokenizer.convert_tokens_to_ids(["1", "="])
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert batch[columns.INPUT_IDS].tolist() == [
        [one, equals, one, eos, pad, pad], [one, equals, one, one, one, eos],
    ]  # fmt: skip
    assert batch[columns.ATTENTION_MASK].int().tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch[columns.LOSS_MASK].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]


def test_long_texts_keep_their_beginning(tokenizer):
    source = TextSource([{"prompt": "1234", "completion": "5678"}], tokenizer=tokenizer,
                        max_length=6)  # fmt: skip
    batch = source.batch(0, 1)
    assert tokenizer.decode(batch[columns.INPUT_IDS][0]) == "123456"
    assert batch[columns.LOSS_MASK][0].int().tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_only_the_assistant_is_learnt_of_a_conversation(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    # All of the assistant's turns, with marks in the template or without; the user's never.
    rows = [{"messages": CHAT}, {"messages": CHAT[:3]}]
    assert targets(tokenizer, rows) == ["yo</s>bye</s>", "yo</s>"]


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_prompt_and_completion_may_be_messages(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    rows = [{"prompt": CHAT[:3], "completion": CHAT[3:]}, {"prompt": "hi", "completion": CHAT[1:2]}]
    assert targets(tokenizer, rows) == ["bye</s>", "yo</s>"]


def test_a_completion_is_tokenised_behind_its_prompt():
    # As one text: tokenised by itself it would begin with a space of its own. The token "42" has
    # characters of both sides, and is what the model has to write.
    tokenizer = sentencepiece_tokenizer()
    source = TextSource(
        SENTENCEPIECE_ROWS, tokenizer=tokenizer, max_length=16, shuffle=False
    ).batch(0, 4)
    rows = zip(*(source[name] for name in (columns.INPUT_IDS, columns.ATTENTION_MASK)), strict=True)
    tokens = [tokenizer.convert_ids_to_tokens(ids[mask]) for ids, mask in rows]
    assert tokens == [
        ["<s>", "\u2581", "2", "+", "2", "=", "4", "</s>"],
        ["<s>", "\u2581the", "\u2581cat", "\u2581the", "\u2581cat", ".", "</s>"],
        ["<s>", "\u2581", "42", "+", "1", "=", "4", "3", "</s>"],
        ["<s>", "\u2581the", "\u2581cat", "</s>"],
    ]
    num_targets = source[columns.LOSS_MASK].sum(1).tolist()
    assert num_targets == [2, 4, 7, 2]


def test_the_loss_of_a_tokenizer_that_prepends_a_space_is_that_of_trl():
    tokenizer = sentencepiece_tokenizer()
    batch = TextSource(SENTENCEPIECE_ROWS, tokenizer=tokenizer, max_length=16).batch(0, 4)
    mask = batch[columns.LOSS_MASK]
    with torch.no_grad():
        logprobs = text_logprobs(llama(), *(batch[name] for name in TEXT_COLUMNS))
    # SFTTrainer.compute_loss of TRL 1.16.0 (transformers 5.23, torch 2.13) on the same rows, model
    # and tokenizer, made by tests/tiny_models.py. Tokenised apart it was 6.188.
    assert float(-logprobs.sum() / mask.sum()) == pytest.approx(6.1417379, abs=1e-5)


def test_texts_end_with_a_token_that_there_must_be():
    tokenizer = byte_tokenizer(ENCODER_SPECIALS)
    with pytest.raises(ValueError, match="tokenizer.eos_token=None must be a token"):
        TextSource([{"text": "a"}], tokenizer=tokenizer, max_length=8)
    # Encoders read pairs with the end that they have.
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=8).batch(0, 1)
    assert tokenizer.decode(batch[columns.CHOSEN_IDS][0]) == "[CLS]abc[SEP]"


def test_cut_texts_are_told_of_once(tokenizer):
    rows = [{"text": "1234"}, {"text": "1"}]
    source = TextSource(rows, tokenizer=tokenizer, max_length=3, shuffle=False)
    with pytest.warns(UserWarning, match="1 of the first 2 texts are longer than max_length=3"):
        source.batch(0, 2)
    pairs = PairSource([{"chosen": "1234", "rejected": "1"}], tokenizer=tokenizer, max_length=3)
    with pytest.warns(UserWarning, match="1 of the first 2 texts .* lose their beginning"):
        pairs.batch(0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.batch(0, 2)
        pairs.batch(0, 1)
    assert source.truncated_share == 1 / 2


def test_a_pad_token_that_is_eos_leaves_eos_a_target():
    tokenizer = byte_tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "ab", "completion": "cdef"}]
    assert targets(tokenizer, rows) == ["c</s>", "cdef</s>"]


def test_a_tokenizer_that_adds_eos_adds_only_one():
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", eos)]
    )
    batch = TextSource([{"text": "ab"}, {"prompt": "ab", "completion": "c"}], shuffle=False,
                       tokenizer=tokenizer, max_length=16).batch(0, 2)  # fmt: skip
    assert (batch[columns.INPUT_IDS] == eos).sum(1).tolist() == [1, 1]


def test_a_row_that_is_no_text_is_refused(tokenizer):
    source = TextSource([{"question": "?"}], tokenizer=tokenizer, max_length=8)
    with pytest.raises(Problems, match=r"columns \['question'\] must have 'text'"):
        source.batch(0, 1)


def test_an_unknown_loss_on_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"loss_on='prompt' must be one of"):
        TextSource([{"text": "1"}], tokenizer=tokenizer, max_length=8, loss_on="prompt")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 3}, "it is int"),
        ({"text": "half \ud83d"}, "surrogates not allowed"),
        ({"prompt": 1, "completion": "2"}, "it is int"),
        ({"messages": [{"speaker": "human", "says": "x"}]}, "must have 'role' and 'content'"),
        ({"messages": "hello"}, "must have 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": 3}]}, "and calls as"),
        ({"messages": [{"role": 3, "content": "x"}]}, "must have 'role' and 'content'"),
        ({"messages": 7}, "messages=7 must be a list"),
    ],
)
def test_rows_that_are_no_text_are_named(row, message):
    source = TextSource([row], tokenizer=byte_tokenizer(), max_length=8)
    with pytest.raises(Problems, match=f"row 0 of a list of rows: .*{message}"):
        source.batch(0, 1)
