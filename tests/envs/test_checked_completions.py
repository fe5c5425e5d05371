from __future__ import annotations

from rllib_llm.envs.checked_completions import decode_completions
from tests.envs.tiny_tokenizers import word_tokenizer
from tests.tiny_models import byte_tokenizer


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_space_between_prompt_and_completion_is_kept():
    tokenizer = word_tokenizer()
    prompt, completion = _ids(tokenizer, "the cat"), _ids(tokenizer, "sat on")
    assert tokenizer.decode(completion) == "sat on"  # alone it would be lost
    assert decode_completions(tokenizer, [prompt[-1]], [completion]) == [" sat on"]


def test_special_tokens_are_left_out():
    tokenizer = word_tokenizer(bos=True)
    sat = _ids(tokenizer, "sat")
    assert decode_completions(tokenizer, [1, 1], [[*sat, 2], [2]]) == ["sat", ""]  # behind BOS


def test_a_character_cut_in_two_by_the_prompts_end():
    tokenizer = byte_tokenizer()
    first, *rest = _ids(tokenizer, "é!")  # two bytes for the letter, one for the mark
    # Joined the bytes are one letter, which the prompt's part alone is not a beginning of.
    assert decode_completions(tokenizer, [first], [rest]) == [tokenizer.decode(rest)]
