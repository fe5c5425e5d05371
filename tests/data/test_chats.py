"""Whose text is what in a rendered conversation; what cannot be told is refused."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from rllib_llm.data.encoding import (
    as_turns,
    content_text,
    encode_chat,
    encode_judged_chat,
    render_chat,
)
from rllib_llm.shared.errors import Problems
from tests.tiny_models import byte_tokenizer

USER = {"role": "user", "content": "hi"}
YO, BYE = ({"role": "assistant", "content": text} for text in ("yo", "bye"))
CHAT = [USER, YO, {"role": "user", "content": "yo"}, BYE]
ROLES = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<U>{{ m['content'] }}\n"
    "{% else %}<A>ANSWER{% endif %}{% endfor %}"
)
# As Qwen3 does it: only the last turn shows that there were thoughts.
LAST_THINKS = (
    ROLES.replace("ANSWER", "{% if loop.last %}<think></think>{% endif %}{{ m['content'] }}</s>\n")
    + "{% if add_generation_prompt %}<A>{% endif %}"
)
# As DeepSeek-R1's: the generation prompt opens thoughts that the conversation does not show.
OPENS_THOUGHTS = ROLES.replace("ANSWER", "{{ m['content'] }}</s>\n") + (
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learnt(template, *chat):
    tokenizer = tokenizer_with(template)
    ids, own = encode_chat(tokenizer, *chat)
    return tokenizer.decode([i for i, mine in zip(ids, own, strict=True) if mine])


def test_a_last_turn_may_be_written_in_another_way():
    # The user repeats the assistant's word, which must not be taken for it.
    assert learnt(LAST_THINKS, CHAT) == "yo</s><think></think>bye</s>"
    assert learnt(LAST_THINKS, CHAT[:2]) == "<think></think>yo</s>"
    assert learnt(LAST_THINKS, CHAT, 2) == "<think></think>bye</s>"


def test_thoughts_that_the_generation_prompt_alone_opens_are_no_part_of_the_turn():
    assert learnt(OPENS_THOUGHTS, CHAT) == "yo</s>bye</s>"
    assert learnt(OPENS_THOUGHTS, CHAT, 2) == "bye</s>"


# As Qwen3's: only as the newest turn a call without thoughts shows that there are none.
CALLS = "{% for c in m['tool_calls'] or [] %}[CALL]{% endfor %}</s>"
DROPS = LAST_THINKS.replace("</s>", CALLS)


def test_a_call_that_the_template_writes_otherwise_when_it_is_old_is_learnt():
    assert learnt(DROPS, called({"a": 1})) == "[CALL]</s><think></think>yo</s>"


FORGETS = ROLES.replace(
    "ANSWER", "{% if loop.last %}{{ m['content'] }}{% else %}...{% endif %}</s>"
)


def test_of_a_template_that_changes_old_turns_the_last_one_is_learnt():
    with pytest.warns(UserWarning, match="is not learnt from.*Make each assistant turn a row"):
        assert learnt(FORGETS + "{% if add_generation_prompt %}<A>{% endif %}", CHAT) == "bye</s>"


def test_a_last_turn_that_the_template_leaves_out_is_refused():
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}<U>{{ m['content'] }}{% endif %}"
    with pytest.raises(Problems) as caught:
        learnt(silent + "{% endfor %}{% if add_generation_prompt %}<A>{% endif %}", CHAT)
    assert caught.value.problem.name == "messages[3]"


def test_an_end_that_takes_in_the_line_break_behind_it_is_learnt():
    """Phi-3's tokens strip: the offsets of <|end|> reach over the line break."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    marks = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, rstrip=True) for mark in marks])
    said = [{**YO, "content": " yo"}, {**BYE, "content": ""}]
    ids, own = encode_chat(tokenizer, [USER, said[0], USER, said[1]])
    shown = [tokenizer.decode([i]) for i, mine in zip(ids, own, strict=True) if mine]
    assert shown == ["y", "o", "<|end|>", "<|end|>"]


MARKED = (
    STRICT + "{% for m in messages %}{% if m['role'] == 'assistant' %}<A>{% generation %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['arguments'] | tojson }}{% endfor %}</s>{% endgeneration %}"
    "{% else %}<U>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A>{% endif %}"
)


def called(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [USER, calls, {"role": "tool", "content": "3"}, YO]


def test_templates_with_marks_take_arguments_as_json_text_and_name_what_they_refuse():
    """As OpenAI writes calls; the text would be learnt in quotes."""
    assert learnt(MARKED, called('{"a": 1}')) == learnt(MARKED, called({"a": 1}))
    assert learnt(MARKED, called('{"a": 1}')) == '{"a": 1}</s>yo</s>'
    assert learnt(MARKED, called('{"a": 1}'), 2) == "yo</s>"  # behind a prompt with a call
    with pytest.raises(Problems, match="what the chat template takes.*user first"):
        learnt(MARKED, CHAT[1:])


def test_a_conversation_without_the_assistant_is_refused():
    with pytest.raises(Problems, match=r"roles \['user'\] must have a turn of 'assistant'"):
        learnt(LAST_THINKS, [USER])


def test_what_a_template_refuses_is_told():
    with pytest.raises(
        Problems, match=r"roles \['assistant'\].*it refuses them \(user first"
    ):
        learnt(STRICT + LAST_THINKS, [YO])


def test_a_tokenizer_without_a_template_says_what_to_do():
    with pytest.raises(Problems, match="has no chat template"):
        render_chat(byte_tokenizer(), CHAT)


def test_judged_chats_end_where_a_sampled_turn_does():
    tokenizer = tokenizer_with(OPENS_THOUGHTS)
    assert tokenizer.decode(encode_judged_chat(tokenizer, CHAT[:2])) == "<U>hi\n<A>yo</s>"
    cut_off = encode_judged_chat(tokenizer, CHAT[:2], finished=False)
    assert tokenizer.decode(cut_off) == "<U>hi\n<A>yo"


def test_a_judged_chat_may_end_with_a_token_that_is_not_eos():
    """Such as Llama 3's <|eot_id|> where EOS is <|end_of_text|>."""
    tokenizer = tokenizer_with(OPENS_THOUGHTS.replace("</s>", "<eot>"))
    tokenizer.add_tokens([AddedToken("<eot>", special=True)])
    cut_off = encode_judged_chat(tokenizer, CHAT[:2], finished=False)
    assert tokenizer.decode(cut_off) == "<U>hi\n<A>yo"


def test_as_turns():
    system = {"role": "system", "content": "be kind"}
    assert as_turns("hi", "yo") == ([USER, YO], 1)
    assert as_turns("hi", [YO]) == ([USER, YO], 1)
    assert as_turns([system, USER], "yo") == ([system, USER, YO], 2)
    assert as_turns("hi", [system, USER, YO]) == ([system, USER, YO], 2)
    assert as_turns(None, CHAT) == (CHAT, 3)


def test_a_chat_with_half_a_character_is_refused_as_data():
    """Training a reward model on it ended in the tokenizer's TypeError."""
    half = [USER, {"role": "assistant", "content": "\ud800"}]
    with pytest.raises(Problems, match="be text that UTF-8 can write.*surrogates not allowed"):
        encode_judged_chat(tokenizer_with(LAST_THINKS), half)


# As Qwen3's, Llama 3's and Gemma 3's templates take content, and LLaVA's, which reads parts alone.
TEXT_ONLY = "{% if m.content is string %}{{ m.content }}{% endif %}"
AS_IT_IS = "{{ m.content | string | trim }}"
BOTH = (
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{% if 'image' in p %}<image>{% endif %}{{ p.text | trim }}"
    "{% endfor %}{% endif %}"
)
PARTS_ONLY = (
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
)


def parts(*texts):
    return [{"type": "text", "text": text, "image": None} for text in texts]  # null: Arrow's


@pytest.mark.parametrize("content", [TEXT_ONLY, AS_IT_IS, BOTH, PARTS_ONLY])
def test_content_may_be_text_or_parts_whatever_the_template_reads(content):
    """Both say the same: U, what the user says, A, what the assistant says, and its end."""
    template = (
        "{% for m in messages %}<{{ m.role[0] | upper }}>" + content + "</s>{% endfor %}"
        "{% if add_generation_prompt %}<A>{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    plain = [{"role": "system", "content": "be kind"}, USER, YO]
    listed = [{**m, "content": parts(m["content"][:1], m["content"][1:])} for m in plain]
    # One part alone, and a tuple, were trained as Python writes them.
    alone = [{**m, "content": parts(m["content"])[0]} for m in plain]
    tuples = [{**m, "content": tuple(m["content"])} for m in listed]
    for chat in (plain, listed, alone, tuples):
        assert render_chat(tokenizer, chat) == "<S>be kind</s><U>hi</s><A>yo</s>"
        assert learnt(template, chat) == "yo</s>"
    assert content_text(plain[0]) == content_text(listed[0]) == "be kind"
    assert as_turns("hi", listed[1:]) == (listed[1:], 1)


def test_parts_stay_parts_where_the_template_reads_them():
    """This template trims each: transformers writes "ab"."""
    tokenizer = tokenizer_with("{% for m in messages %}" + BOTH + "{% endfor %}")
    chat = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a ", "b")]}]
    assert render_chat(tokenizer, chat) == "ab"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"


@pytest.mark.parametrize("part", [
    {"type": "image"}, {"type": "image_url", "image_url": {"url": "u"}}, {"image": "p.png"},
])  # fmt: skip
def test_images_are_refused_by_name(part):
    chat = [{"role": "user", "content": [*parts("look: "), part]}, YO]
    with pytest.raises(Problems, match="role 'user'=.*image.*must be of the type 'text'"):
        learnt(LAST_THINKS, chat)
