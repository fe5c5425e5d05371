from __future__ import annotations

import pytest

from rllib_llm.data.preferences import PairSource
from rllib_llm.envs.frozen_models import RewardTextEncoder, same_tokenizer
from rllib_llm.shared import columns
from tests import tiny_models as tiny

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def decoded(encoder: RewardTextEncoder, *args, **kwargs) -> list[str]:
    return [encoder.tokenizer.decode(ids) for ids in encoder.encode(*args, **kwargs)]


def chat_tokenizer():
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_prompt_and_completion_are_one_text_by_default():
    encoder = RewardTextEncoder(tiny.byte_tokenizer())
    assert decoded(encoder, ["How?", "a{b"], [" So.", "}c"]) == ["<s>How? So.", "<s>a{b}c"]


def test_eos_ends_finished_completions_where_asked():
    encoder = RewardTextEncoder(tiny.byte_tokenizer(), append_eos=True)
    texts = decoded(encoder, ["a", "b"], ["c", "d"], finished=[True, False])
    assert texts == ["<s>ac</s>", "<s>bd"]


def test_template_with_places():
    encoder = RewardTextEncoder(tiny.byte_tokenizer(), template="Q: {prompt}\nA: {completion}!")
    assert decoded(encoder, ["why {completion}?"], ["{prompt}"]) == [
        "<s>Q: why {completion}?\nA: {prompt}!"
    ]


def test_pairs_are_joined_by_the_tokenizer():
    tokenizer = tiny.byte_tokenizer(tiny.ENCODER_SPECIALS, pad="[PAD]")
    encoder = RewardTextEncoder(tokenizer, template="pair", max_length=7)
    assert decoded(encoder, ["ab"], ["cd"]) == ["[CLS]ab[SEP]cd[SEP]"]
    assert decoded(encoder, ["0123456ab"], ["cd"]) == ["[CLS]ab[SEP]cd[SEP]"]
    assert encoder.num_truncated == 1


def test_chats_go_through_the_reward_models_own_template():
    encoder = RewardTextEncoder(chat_tokenizer())
    wanted = ["<system>be kind<user>hi<assistant>hello"]
    assert decoded(encoder, [CHAT], ["hello"]) == wanted
    assert decoded(encoder, ["<<policy's rendering>>"], ["hello"], messages=[CHAT]) == wanted
    assert decoded(encoder, ["hi"], ["hello"]) == ["<s>hihello"]
    always = RewardTextEncoder(chat_tokenizer(), template="chat")
    assert decoded(always, ["hi"], ["hello"]) == ["<user>hi<assistant>hello"]


def test_chats_without_a_chat_template_are_read_as_text():
    encoder = RewardTextEncoder(tiny.byte_tokenizer())
    assert decoded(encoder, [CHAT], ["hello"]) == ["<s>be kind\n\nhi\n\nhello"]
    assert decoded(encoder, ["rendered "], ["hello"], messages=[CHAT]) == ["<s>rendered hello"]


def test_too_long_texts_keep_their_beginning_token_and_their_end():
    encoder = RewardTextEncoder(tiny.byte_tokenizer(), max_length=4)
    assert decoded(encoder, ["abc"], ["def"]) == ["<s>def"]
    assert encoder.num_truncated == 1


@pytest.mark.parametrize("template", ["{prompt}", "", "{completion}{completion}"])
def test_template_without_one_place_for_the_completion(template):
    with pytest.raises(ValueError, match="must be 'chat', 'pair' or a text with"):
        RewardTextEncoder(tiny.byte_tokenizer(), template=template)


def test_chat_needs_a_chat_template():
    with pytest.raises(ValueError, match="tokenizer has no chat template"):
        RewardTextEncoder(tiny.byte_tokenizer(), template="chat")


@pytest.mark.parametrize("make, row", [
    (tiny.sentencepiece_tokenizer, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
    (tiny.byte_tokenizer, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
    (chat_tokenizer, {"prompt": CHAT, "chosen": "hello", "rejected": "go"}),
])  # fmt: skip
def test_the_judge_reads_what_it_was_trained_on(make, row):
    tokenizer = make()
    if tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE.replace("{% endfor %}", "</s>{{ '\n' }}{% endfor %}")
    batch = PairSource([row], tokenizer=tokenizer, max_length=256).batch(0, 1)
    trained = batch[columns.CHOSEN_IDS][0].tolist()
    encoder = RewardTextEncoder(tokenizer, append_eos=True)
    assert encoder.encode([row["prompt"]], [row["chosen"]]) == [trained]
    # A completion that the length limit ended has no end, in a chat neither.
    cut_off = encoder.encode([row["prompt"]], [row["chosen"]], finished=[False])
    assert cut_off == [trained[:-1]]
    # Where the policy has the same tokenizer the judge reads its ids as they were sampled.
    text = row["prompt"]
    if isinstance(text, list):
        text = "".join(f"<{turn['role']}>{turn['content']}</s>\n" for turn in CHAT) + "<assistant>"
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt_ids = tokenizer(text)["input_ids"]
    sampled = trained[len(prompt_ids) :]
    assert trained[: len(prompt_ids)] == prompt_ids
    assert tokenizer.decode(sampled) == row["chosen"] + "</s>"


@pytest.mark.parametrize("template", [None, "pair", "{prompt} {completion}"])
@pytest.mark.parametrize("specials", [tiny.DECODER_SPECIALS, tiny.ENCODER_SPECIALS])
def test_a_text_that_begins_with_its_own_start_has_one(template, specials):
    """The prompt of another tokenizer, rendered, begins with BOS or CLS."""
    tokenizer = tiny.byte_tokenizer(specials)
    start = tokenizer.bos_token or tokenizer.cls_token
    encoder = RewardTextEncoder(tokenizer, template=template)
    plain = encoder.encode(["a"], ["b"])
    with pytest.warns(UserWarning, match="one is kept"):
        assert encoder.encode([f"{start}a"], ["b"]) == plain


@pytest.mark.parametrize("append_eos", [True, False])
def test_chats_are_read_with_the_tools_and_settings_of_their_row(append_eos):
    tokenizer = chat_tokenizer()
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% if tools %}T{{ tools[0].name }}{% endif %}{{ mood }}" + template
    encoder = RewardTextEncoder(tokenizer, append_eos=append_eos)
    columns = {"tools": [[{"name": "add"}], None], "chat_template_kwargs": ['{"mood": "M"}', None]}
    told, plain = map(tokenizer.decode, encoder.encode([CHAT, CHAT], ["x", "x"], **columns))
    assert told == "TaddM" + plain


def test_same_tokenizer():
    ours = tiny.byte_tokenizer()
    assert same_tokenizer(ours, tiny.byte_tokenizer())
    assert not same_tokenizer(ours, tiny.byte_tokenizer(reverse=True))
    assert not same_tokenizer(ours, chat_tokenizer())
    assert same_tokenizer(chat_tokenizer(), ours)  # no template of its own to obey
    bare = tiny.byte_tokenizer()
    bare.backend_tokenizer.post_processor = tiny.processors.ByteLevel()  # no BOS in front
    assert not same_tokenizer(ours, bare)
