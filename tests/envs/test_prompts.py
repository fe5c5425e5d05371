from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from rllib_llm.data.encoding import encode_chat
from rllib_llm.envs import prompts
from rllib_llm.envs.prompts import PromptEncoder, PromptRow, PromptSource
from rllib_llm.shared.errors import Problems
from tests.conversations.templates import ADD, family_tokenizer
from tests.envs.tiny_tokenizers import word_tokenizer
from tests.tiny_models import byte_tokenizer

TEN = [{"prompt": f"prompt {i}", "label": i} for i in range(10)]


def test_rows_are_a_function_of_seed_and_position():
    source = PromptSource(TEN, seed=3)
    order = source.indices(0, 25).tolist()
    # Another object, asked out of order and in other portions, says the same.
    other = PromptSource(TEN, seed=3)
    assert other.indices(20, 5).tolist() == order[20:]
    assert other.indices(7, 13).tolist() == order[7:20]
    assert PromptSource(TEN, seed=4).indices(0, 25).tolist() != order


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    source = PromptSource(TEN, seed=0)
    epochs = [source.indices(10 * e, 10).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffle_the_order_is_the_data_sets():
    source = PromptSource(TEN, shuffle=False)
    assert source.indices(8, 4).tolist() == [8, 9, 0, 1]
    assert source.rows(1, 1) == [PromptRow(1, "prompt 1", {"label": 1})]


def test_train_and_eval_share_no_prompt_and_ignore_the_seed():
    train = PromptSource(TEN, seed=1, eval_fraction=0.3)
    held_out = PromptSource(TEN, seed=1, eval_fraction=0.3, split="eval")
    assert (len(train), len(held_out)) == (7, 3)
    in_train, in_eval = set(train.indices(0, 7).tolist()), set(held_out.indices(0, 3).tolist())
    assert in_train | in_eval == set(range(10)) and not in_train & in_eval
    again = PromptSource(TEN, seed=99, eval_fraction=0.3, split="eval")
    assert set(again.indices(0, 3).tolist()) == in_eval
    other = [
        set(PromptSource(TEN, eval_fraction=0.3, split="eval", split_seed=s).indices(0, 3).tolist())
        for s in range(5)
    ]
    assert any(chosen != in_eval for chosen in other)


def test_eval_prompts_of_their_own_leave_the_training_prompts_whole():
    held_out = [{"prompt": "held out"}]
    assert len(PromptSource(TEN, eval_data=held_out)) == 10
    source = PromptSource(TEN, eval_data=held_out, split="eval")
    assert source.rows(0, 2) == [PromptRow(0, "held out", {})] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "split='test' must be one of"),
        ({"eval_fraction": 1.0}, "of 10 rows 10 would be held out"),
        ({"eval_fraction": "x"}, "eval_fraction='x' must be a number of at least 0 and at most 1"),
        ({"split": "eval"}, "split='eval' must have prompts of its own"),
        ({"eval_fraction": 0.1, "eval_data": TEN}, "eval_fraction=0.1 must be 0 where"),
        ({"eval_fraction": 0.99}, "of 10 rows 10 would be held out"),
    ],
)
def test_wrong_splits(settings, message):
    with pytest.raises(Problems, match=message):
        PromptSource(TEN, **settings)


def test_the_prompt_column_is_chosen_or_named():
    assert PromptSource(["just text"]).prompt_column == "text"
    assert PromptSource([{"question": "a", "label": 1}], prompt_column="question").rows(0, 1) == [
        PromptRow(0, "a", {"label": 1})
    ]
    with pytest.raises(Problems, match=r"no column 'prompt' but \['question', 'label'\]"):
        PromptSource([{"question": "a", "label": 1}])
    with pytest.raises(Problems, match="prompts.column must be set"):
        PromptSource([{}, {}])
    with pytest.raises(Problems, match="column='qestion' must be .*'question'"):
        PromptSource([{"question": "a", "label": 1}], prompt_column="qestion")


def test_empty_data_and_wrong_rows():
    with pytest.raises(Problems, match="at least one row"):
        PromptSource([])
    with pytest.raises(Problems, match=r"row 0 of .*: prompt=3 must be text or messages"):
        PromptSource([{"prompt": 3}]).rows(0, 1)
    with pytest.raises(AssertionError):
        PromptSource(TEN).indices(-1, 2)
    halves = PromptSource([{"prompt": "\ud83d"}])
    with pytest.raises(Problems, match="row 0: .* must be text that UTF-8 can write"):
        PromptEncoder(word_tokenizer(), 16).encode(halves.rows(0, 1))


def _encode(tokenizer, *prompts, max_prompt_len=16, **settings):
    encoder = PromptEncoder(tokenizer, max_prompt_len, **settings)
    return encoder.encode([PromptRow(i, prompt, {}) for i, prompt in enumerate(prompts)])


def test_judges_are_given_the_chat_and_no_other_messages():
    chat = [{"role": "user", "content": "the cat"}]
    rows = [{"prompt": chat, "label": 1}, {"prompt": "text", "messages": chat, "label": 2}]
    source = PromptSource(rows, shuffle=False)
    assert source.row(0).columns == {"label": 1, "messages": chat}
    assert source.row(1).columns == {"label": 2}  # the chat may hold the answer
    (only,) = PromptSource([{"messages": chat}]).rows(0, 1)
    assert only.prompt == chat and only.columns == {"messages": chat}


def test_text_is_encoded_as_the_tokenizer_does_but_never_ended():
    cat = word_tokenizer()("cat")["input_ids"]
    assert _encode(word_tokenizer(), "cat")[0] == [cat]
    assert _encode(word_tokenizer(bos=True), "cat")[0] == [[1, *cat]]  # 1 is BOS
    # This tokenizer puts EOS (2) behind every text: the completion would follow an end.
    assert word_tokenizer(bos=True, eos_added=True)("cat")["input_ids"] == [1, *cat, 2]
    assert _encode(word_tokenizer(bos=True, eos_added=True), "cat")[0] == [[1, *cat]]


def test_an_empty_prompt_is_bos_or_refused():
    assert _encode(word_tokenizer(), "")[0] == [[1]]
    without = word_tokenizer()
    without.bos_token = None
    with pytest.raises(Problems, match="row 0: prompt='' must have a token"):
        _encode(without, "")


def test_chat_messages_go_through_the_template():
    messages = [{"role": "user", "content": "the cat"}]
    tokenizer = word_tokenizer(chat=True, bos=True)
    ids, texts = _encode(tokenizer, messages)
    # The template of the tokenizer: <role> content, then the generation prompt; no second BOS.
    assert texts == ["<user> the cat <assistant>"]
    assert ids == [tokenizer(texts[0], add_special_tokens=False)["input_ids"]]
    assert ids[0][-1] == tokenizer.convert_tokens_to_ids("<assistant>")
    with pytest.raises(Problems, match="row 0: messages must .* has no chat template"):
        _encode(word_tokenizer(), messages)
    # What a template complains of is said with the row, and is a mistake of the user's.
    tokenizer.chat_template = "{{ raise_exception('users first') }}"
    with pytest.raises(Problems, match=r"row 0: messages .*refuses them \(users first\)"):
        _encode(tokenizer, messages)


def test_tools_of_a_row_are_announced_as_sft_announces_them():
    """A policy was trained without the tools that it had been fine-tuned with."""
    tokenizer, chat = family_tokenizer("chatml"), [{"role": "user", "content": "1 + 1?"}]
    told = [*chat, {"role": "assistant", "content": "2"}]
    learnt, own = encode_chat(tokenizer, told, tools=[ADD])
    rows = PromptSource([{"prompt": chat, "tools": [ADD]}]).rows(0, 1)
    (ids,), _ = PromptEncoder(tokenizer, 400).encode(rows)
    assert ids == learnt[: own.index(True)]


def test_too_long_prompts_keep_bos_and_their_end_and_warn_once():
    encoder = PromptEncoder(word_tokenizer(bos=True), max_prompt_len=3)
    rows = [PromptRow(i, text, {}) for i, text in enumerate(["the cat sat on", "a dog", "a b c d"])]
    with pytest.warns(UserWarning, match="2 of the first 3 prompts are longer than max_prompt_len"):
        ids, texts = encoder.encode(rows)
    full = word_tokenizer(bos=True)("the cat sat on")["input_ids"]
    assert ids[0] == [1, *full[-2:]] and len(ids[1]) == 3
    assert texts[:2] == ["sat on", "a dog"]  # the text is what the ids say
    assert len(encoder.truncated) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoder.encode(rows)[0] == ids  # from the cache, without a further word
        encoder.encode([PromptRow(9, "the cat sat on", {})])
    assert len(encoder.truncated) == 3


def test_too_long_prompts_are_refused_when_asked():
    with pytest.raises(Problems, match=r"row 1: prompt .* max_prompt_len=2 .*has 4"):
        _encode(word_tokenizer(), "the cat", "the cat sat on", max_prompt_len=2, overflow="error")
    with pytest.raises(Problems, match="prompt_overflow='cut' must be one of"):
        PromptEncoder(word_tokenizer(), 4, "cut")


def test_every_prompt_is_looked_at_where_long_ones_are_refused():
    source = PromptSource([{"prompt": "a"}] * 12 + [{"prompt": "a b c d e"}], shuffle=False)
    encoder = PromptEncoder(word_tokenizer(), 4, "error")
    encoder.encode(source.rows(0, 12))
    with pytest.raises(Problems, match="row 12: prompt must have at most max_prompt_len=4"):
        encoder.check(source.all_rows())
    assert encoder.longest(source) == len(word_tokenizer()("a b c d e")["input_ids"])


def test_a_batch_may_hold_more_prompts_than_are_remembered(monkeypatch):
    monkeypatch.setattr(prompts, "_NUM_REMEMBERED", 2)
    texts = ["the cat", "red", "a big dog", "the cat", "red"]
    rows = [PromptRow(i % 3, text, {}) for i, text in enumerate(texts)]
    encoder = PromptEncoder(word_tokenizer(), 16)
    assert encoder.encode(rows)[1] == texts and encoder.encode(rows[::-1])[1] == texts[::-1]


def test_the_prompt_cache_keeps_its_bound_under_threads(monkeypatch):
    monkeypatch.setattr(prompts, "_NUM_REMEMBERED", 20)
    encoder = PromptEncoder(byte_tokenizer(), 32)
    rows = [PromptRow(index, str(index), {}) for index in range(2000)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(8) as pool:
        batches = [rows[first:] + rows[:first] for first in range(0, 2000, 250)]
        texts = [*pool.map(lambda batch: encoder.encode(batch)[1], batches)]
    sys.setswitchinterval(switch)
    assert len(encoder._cache) <= 20
    assert texts == [[row.prompt for row in batch] for batch in batches]
