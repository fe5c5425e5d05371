"""Preference pairs as token batches: what of them is the prompt, what is cut, what is left out."""

from __future__ import annotations

import warnings

import pytest

from rllib_llm.data.preferences import PairSource, PromptedPairSource
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import build_model
from tests.data.test_texts import CHAT, PLAIN_TEMPLATE
from tests.tiny_models import byte_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_model()[1]


def texts(tokenizer, batch, ids, mask):
    return [tokenizer.decode(row[keep]) for row, keep in zip(batch[ids], batch[mask], strict=True)]


def test_pairs_share_their_prompt_and_end_with_eos(tokenizer):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "33"}, {"chosen": "4", "rejected": "5"}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=32, shuffle=False).batch(0, 2)

    chosen = texts(tokenizer, batch, columns.CHOSEN_IDS, columns.CHOSEN_MASK)
    rejected = texts(tokenizer, batch, columns.REJECTED_IDS, columns.REJECTED_MASK)
    assert chosen == ["1+1=2<eos>", "4<eos>"]
    assert rejected == ["1+1=33<eos>", "5<eos>"]


def test_the_share_of_cut_texts_counts_both_of_a_pair(tokenizer):
    rows = [{"prompt": "12", "chosen": "3", "rejected": "456"}, {"chosen": "1", "rejected": "2"}]
    source = PairSource(rows, tokenizer=tokenizer, max_length=4, shuffle=False)
    assert source.truncated_share == 0
    with pytest.warns(UserWarning, match="longer than max_length=4"):
        source.batch(0, 2)
    assert source.truncated_share == 1 / 4  # "12456" and EOS alone


def test_long_pairs_keep_their_end(tokenizer):
    rows = [{"prompt": "123456", "chosen": "7", "rejected": "8"}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=4).batch(0, 1)
    assert tokenizer.decode(batch[columns.CHOSEN_IDS][0]) == "567<eos>"


def test_long_pairs_keep_the_token_they_begin_with():
    # As the scorer reads them: see `RewardTextEncoder.shorten`.
    tokenizer = byte_tokenizer()
    batch = PairSource([{"chosen": "1234", "rejected": "5"}], tokenizer=tokenizer,
                       max_length=4).batch(0, 1)  # fmt: skip
    assert tokenizer.decode(batch[columns.CHOSEN_IDS][0]) == "<s>34</s>"


def test_pairs_of_conversations_go_through_the_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    rows = [{"prompt": CHAT[:1], "chosen": [CHAT[1]], "rejected": [CHAT[3]]}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=64).batch(0, 1)
    assert tokenizer.decode(batch[columns.CHOSEN_IDS][0]) == "U:hiA:yo</s>"


def test_a_row_that_is_no_pair_is_refused(tokenizer):
    with pytest.raises(Problems, match="must have the columns 'chosen' and 'rejected'"):
        PairSource([{"chosen": "1"}], tokenizer=tokenizer, max_length=8)
    with pytest.raises(Problems, match="row 1 of .* must have text or messages"):
        rows = [{"chosen": "1", "rejected": "2"}, {"chosen": "1", "rejected": None}]
        PairSource(rows, tokenizer=tokenizer, max_length=8)


def test_pairs_are_tokenised_behind_their_prompt():
    tokenizer = sentencepiece_tokenizer()
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=16).batch(0, 1)
    assert tokenizer.convert_ids_to_tokens(batch[columns.CHOSEN_IDS][0]) == [
        "<s>", "\u2581", "2", "+", "2", "=", "4", "</s>"
    ]  # fmt: skip


PREFERENCES = (PairSource, PromptedPairSource)


@pytest.mark.parametrize("source", PREFERENCES)
def test_a_text_as_prompt_of_conversations_is_the_users_turn(source):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    answers = {"chosen": [CHAT[1]], "rejected": [CHAT[3]]}
    whole = {name: [CHAT[0], *turns] for name, turns in answers.items()}
    # Both ways of UltraFeedback and its like: the answers alone, or repeated with their prompt.
    rows = [{"prompt": "hi", **answers}, {"prompt": "hi", **whole}, {"prompt": CHAT[:1], **whole},
            whole]  # fmt: skip
    batch = source(rows, tokenizer=tokenizer, max_length=64, shuffle=False).batch(0, 4)
    chosen = texts(tokenizer, batch, columns.CHOSEN_IDS, columns.CHOSEN_MASK)
    assert chosen == ["U:hiA:yo</s>" if source is PairSource else "yo</s>"] * 4
    if source is PromptedPairSource:
        prompts = texts(tokenizer, batch, columns.PROMPT_IDS, columns.PROMPT_MASK)
        assert prompts == ["U:hiA:"] * 4


@pytest.mark.parametrize("source", PREFERENCES)
def test_answers_that_begin_with_anothers_turn_are_refused(source):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    rows = [{"prompt": "no", "chosen": CHAT[:2], "rejected": CHAT[2:]}]
    with pytest.raises(Problems, match="row 0 of .* must be followed or repeated"):
        source(rows, tokenizer=tokenizer, max_length=64).batch(0, 1)


def test_judged_conversations_end_with_the_token_that_ends_the_turn():
    # What the policy samples ends there; the newline that templates write behind is not sampled.
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("{{ eos_token }}", "{{ eos_token }}{{ '\n' }}")
    rows = [{"prompt": CHAT[:1], "chosen": [CHAT[1]], "rejected": [CHAT[3]]}]
    batch = PairSource(rows, tokenizer=tokenizer, max_length=64).batch(0, 1)
    assert tokenizer.decode(batch[columns.CHOSEN_IDS][0]) == "U:hiA:yo</s>"


@pytest.mark.parametrize("source", PREFERENCES)
def test_equal_texts_are_left_out_and_counted(source, tokenizer):
    rows = [{"prompt": "1", "chosen": "2", "rejected": text} for text in ("3", "2", "4")]
    with pytest.warns(UserWarning, match="1 of 3 pairs .* are left out: their chosen and rejected"):
        pairs = source(rows, tokenizer=tokenizer, max_length=8, shuffle=False)
    assert len(pairs) == 2
    rejected = pairs.batch(0, 2)
    assert texts(tokenizer, rejected, columns.REJECTED_IDS, columns.REJECTED_MASK) == [
        "13<eos>" if source is PairSource else "3<eos>",
        "14<eos>" if source is PairSource else "4<eos>",
    ]
    with pytest.raises(Problems, match="all 1 are the same"):
        source(rows[1:2], tokenizer=tokenizer, max_length=8)


def prompted(rows, tokenizer, max_length=64):
    batch = PromptedPairSource(
        rows, tokenizer=tokenizer, max_length=max_length, shuffle=False
    ).batch(0, len(rows))
    return [
        texts(tokenizer, batch, *names)
        for names in (
            (columns.PROMPT_IDS, columns.PROMPT_MASK),
            (columns.CHOSEN_IDS, columns.CHOSEN_MASK),
            (columns.REJECTED_IDS, columns.REJECTED_MASK),
        )
    ]


def test_prompts_stand_apart_from_what_the_policy_writes(tokenizer):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "23"},
            {"chosen": "1+3=4", "rejected": "1+3=5"}]  # fmt: skip
    assert prompted(rows, tokenizer) == [
        # Without the column, the prompt is what both begin with.
        ["1+1=", "1+3="],
        ["2<eos>", "4<eos>"],
        ["23<eos>", "5<eos>"],
    ]


def test_a_token_of_prompt_and_answer_is_the_answers():
    # "4" and "2" become the one token "42": the prompt ends before it for both.
    rows = [{"prompt": "4", "chosen": "2", "rejected": "3"}]
    assert prompted(rows, sentencepiece_tokenizer()) == [["<s> "], ["42</s>"], ["43</s>"]]


def test_a_pair_without_a_beginning_is_refused(tokenizer):
    with pytest.raises(Problems, match="row 0 of .* a pair must have a prompt"):
        prompted([{"chosen": "1", "rejected": "2"}], tokenizer)


def test_long_pairs_keep_half_for_the_prompt(tokenizer):
    rows = [{"prompt": "123456", "chosen": "7", "rejected": "89"},
            {"prompt": "123456", "chosen": "7", "rejected": "1234567"}]  # fmt: skip
    with pytest.warns(UserWarning, match="lose their prompt's beginning, then their end"):
        cut = prompted(rows, tokenizer, max_length=8)
    # 6 + 3 is one too many: the prompt loses one. 6 + 8 are six too many: the prompt keeps four.
    assert cut == [["23456", "3456"], ["7<eos>", "7<eos>"], ["89<eos>", "1234"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompted(rows, tokenizer, max_length=14)


def test_answers_hold_nothing_but_the_assistant():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    rows = [{"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:2]}]
    with pytest.raises(Problems, match="must answer the same prompt"):
        prompted(rows, tokenizer)


@pytest.mark.parametrize("source", PREFERENCES)
def test_tools_are_announced_to_reward_models_and_policies_alike(source):
    """As TRL's RewardTrainer does it; the template writes them first."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools %}T:{{ tools[0].name }}{% endif %}" + PLAIN_TEMPLATE
    row = {"prompt": CHAT[:1], "chosen": [CHAT[1]], "rejected": [CHAT[3]],
           "tools": [{"name": "add"}]}  # fmt: skip
    batch = source([row], tokenizer=tokenizer, max_length=64).batch(0, 1)
    name = "chosen" if source is PairSource else "prompt"
    (text,) = texts(tokenizer, batch, f"{name}_ids", f"{name}_mask")
    assert text == ("T:addU:hiA:yo</s>" if source is PairSource else "T:addU:hiA:")


@pytest.mark.parametrize("end", ["{{ eos_token }}{{ '\n' }}", ""])
def test_policies_are_scored_up_to_the_end_of_the_turn_also_where_they_say_nothing(end):
    """As SFT learns it: a line break behind the end is the template's. An empty answer of a
    template that ends turns with no token was "True is not in list"."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("{{ eos_token }}", end)
    row = {"prompt": CHAT[:1], "chosen": [CHAT[1]], "rejected": [{**CHAT[1], "content": ""}]}
    batch = PromptedPairSource([row], tokenizer=tokenizer, max_length=64).batch(0, 1)
    has_end = "eos" in end
    chosen = texts(tokenizer, batch, columns.CHOSEN_IDS, columns.CHOSEN_LOSS_MASK)
    rejected = texts(tokenizer, batch, columns.REJECTED_IDS, columns.REJECTED_LOSS_MASK)
    assert (chosen, rejected) == (["yo</s>" if has_end else "yo"], ["</s>"])
    prompts = texts(tokenizer, batch, columns.PROMPT_IDS, columns.PROMPT_MASK)
    assert prompts == ["U:hiA:"]


def test_two_answers_in_a_row_are_scored_without_what_stands_between():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    row = {"prompt": CHAT[:1], "chosen": [CHAT[1], CHAT[3]], "rejected": [CHAT[3]]}
    batch = PromptedPairSource([row], tokenizer=tokenizer, max_length=64).batch(0, 1)
    chosen = texts(tokenizer, batch, columns.CHOSEN_IDS, columns.CHOSEN_LOSS_MASK)
    assert chosen == ["yo</s>bye</s>"]
