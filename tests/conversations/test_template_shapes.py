"""Templates whose turns end, begin or call in ways of their own, walked through against an oracle.

The oracle renders the whole conversation again and encodes it at once. The templates are written
here after the shapes of well-known families; with TRL installed, all of its templates are tried.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rllib_llm.conversations.chat_format import ChatFormat, ChatFormatError
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import prove, require_tools
from rllib_llm.data.encoding import encode_chat
from tests.conversations.templates import ADD, FAMILIES, TEXT, family_tokenizer

_TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
# No token ends a turn: what the next one begins with does.
GLM = (
    "[gMASK]<sop>" + _TOOLS + "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Calls end otherwise than words, and the newest turn otherwise than old ones.
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>functions: " + _TOOLS + "<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# A call is ended by what begins its result, which belongs to the same turn.
GEMMA4 = (
    "<bos>{% if tools %}<|turn>system\n" + _TOOLS + "<turn|>\n{% endif %}"
    "{% set ns = namespace(open=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if not ns.open %}<|turn>model\n{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name ~ '{' }}"
    '{% for k, v in c.function.arguments.items() %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}'
    "<tool_call|>{% endfor %}<|tool_response>{% set ns.open = true %}"
    "{% else %}{{ m.content | trim }}<turn|>\n{% set ns.open = false %}{% endif %}"
    "{% elif m.role == 'tool' %}response:{{ m.name }}{{ m.content }}<tool_response|>"
    "{% else %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
# Several special tokens end a turn, and a generation prompt is always written.
COHERE = (
    "<bos>{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>" + _TOOLS + "<|END_OF_TURN_TOKEN|>"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{% if m.tool_calls %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>"
    "<|START_ACTION|>["
    "{% for c in m.tool_calls %}"
    '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|END_ACTION|><|END_OF_TURN_TOKEN|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endif %}"
    "{% elif m.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>"
    "{{ m.content }}<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>"
    "{% else %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endif %}"
    "{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
MISTRAL_V11 = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
    "[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
    "[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# Their generation prompt is not how the template writes a turn: it opens thoughts (QwQ, GLM 4.7),
# says that there are none (Command R7B, which writes it always; the large Gemma 4), or the result
# before it ends otherwise once it is answered (Hermes 2 Pro).
_HERMES_TURNS = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '\\n' if m.role != 'tool' or not loop.last }}<|im_end|>\n{% endif %}{% endfor %}"
)
HERMES2 = _HERMES_TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWQ = HERMES2.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    " if m.role != 'tool' or not loop.last", ""
)
GLM47 = GLM.replace(
    "<think>{{ m.reasoning_content or '' }}</think>",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}</think>",
).replace("<|assistant|>{% endif %}", "<|assistant|>\n<think>{% endif %}")
COHERE_R7B = COHERE.removesuffix("{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>") + (
    "{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"
)
GEMMA4_LARGE = GEMMA4.replace(
    "<|turn>model\n{% endif %}\n", "<|turn>model\n<|channel>thought\n<channel|>{% endif %}\n"
).removesuffix("<|turn>model\n{% endif %}") + (
    "<|turn>model\n<|channel>thought\n<channel|>{% endif %}"
)
OPENERS = {
    "hermes2": (HERMES2, "<|im_end|>"), "qwq": (QWQ, "<|im_end|>"),
    "glm4.7": (GLM47, "<|endoftext|>"), "r7b": (COHERE_R7B, "<|END_OF_TURN_TOKEN|>"),
    "gemma4": (GEMMA4_LARGE, "<eos>"),
}  # fmt: skip
SHAPES = {
    "glm": (GLM, "<|endoftext|>"), "harmony": (HARMONY, "<|return|>"), "gemma4": (GEMMA4, "<eos>"),
    "cohere": (COHERE, "<|END_OF_TURN_TOKEN|>"), "mistral": (MISTRAL_V11, "</s>"),
}  # fmt: skip
_SPECIAL = re.compile(
    r"<\|[^|<>\n{}]{1,40}\|>|<\|?(?:bos|turn\||turn|tool_call|tool_response|tool|channel|s)\|?>"
    r'|<\|"\|>|<｜[^｜<>\n]{1,40}｜>|</s>|<(?:start|end)_of_(?:turn|utterance)>|\[/?[A-Z_]{4,16}\]'
)


def tokenizer_for(template, eos):
    """A byte-level tokenizer whose special tokens are those that the template writes."""
    found = {*_SPECIAL.findall(template)} - {"<|tool_call>call", "<tool_call>", "<tool>"}
    specials = ["<pad>", "<unk>", *sorted(found | {eos, "<bos>"})]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>",
        eos_token=eos, additional_special_tokens=specials[2:], chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def outcomes(chat_format):
    return {finding.dialogue: finding.outcome for finding in prove(chat_format)}


@pytest.mark.parametrize("shape", SHAPES)
def test_tools_of_the_shape_are_proven_and_its_own_calls_read(shape):
    chat_format = ChatFormat(tokenizer_for(*SHAPES[shape]), tools=[ADD])
    found = prove(chat_format)
    require_tools(chat_format, found)
    by_name = {finding.dialogue: finding.outcome for finding in found}
    old = "keeps" if shape == "harmony" else "appends"
    assert by_name["turns"] == old and by_name["turns after tool calls"] == old
    assert by_name["tool calls"] == "appends"


@pytest.mark.parametrize("shape", OPENERS)
def test_a_turn_that_the_generation_prompt_does_not_begin_is_proven_with_tools(shape):
    chat_format = ChatFormat(tokenizer_for(*OPENERS[shape]), tools=[ADD])
    found = prove(chat_format)
    require_tools(chat_format, found)
    by_name = {finding.dialogue: finding.outcome for finding in found}
    assert by_name["turns"] == ("appends" if shape == "hermes2" else "forks")
    assert by_name["turns after tool calls"] == "forks"


def test_a_turn_that_the_next_one_s_beginning_ends_is_kept():
    """GLM 4.7 with `history="keep"` was refused: one end of a turn was written "in place of 1"."""
    tokenizer = tokenizer_for(*OPENERS["glm4.7"])
    chat_format = ChatFormat(tokenizer, tools=[ADD], history="keep")
    found = {finding.dialogue: finding.outcome for finding in prove(chat_format)}
    assert found["tool calls"] == found["turns after tool calls"] == "keeps"
    call = "So.</think>\n<tool_call>add\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n" \
           "</tool_call><|observation|>"  # fmt: skip
    conversation = Conversation(chat_format)
    conversation.append_messages([{"role": "user", "content": "x"}])
    for answer in ("8", "9"):
        conversation.append_sampled(ids := chat_format.encode(call), [0.0] * len(ids))
        result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": answer}
        conversation.append_messages([result])
    results = "\n<tool_response>8</tool_response><|assistant|>\n<think>"
    kept = f"{call}{results}{call}{results.replace('8', '9')}"
    assert tokenizer.decode(conversation.token_ids).endswith(kept)


@pytest.mark.parametrize("shape", OPENERS)
def test_a_fork_is_what_the_template_writes_of_all_that_was_said(shape):
    """Calls and words arrive whole, whatever the generation prompt opened."""
    chat_format = ChatFormat(tokenizer_for(*OPENERS[shape]), tools=[ADD])
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "8"},
        {"role": "assistant", "content": "Eight."},
        {"role": "user", "content": "Sure?"},
    ]
    conversation = Conversation(chat_format)
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            conversation.append_messages([turn])
            continue
        said = chat_format.said(turns[:place], turn)
        reply = conversation.append_sampled(ids := chat_format.encode(said), [0.0] * len(ids))
        assert (reply.content, len(reply.tool_calls)) == (turn["content"], int(place == 1))
    assert conversation.suffixes["fork"] >= 1
    whole = chat_format.encode(chat_format.render(turns, generation_prompt=True))
    assert conversation.token_ids == whole


CALL = {"type": "function", "id": "call00000",
        "function": {"name": "add", "arguments": {"text": "7 + 1"}}}  # fmt: skip
TURNS = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": ""},
    {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "8"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "Sure?"},
]


def played(chat_format, turns):
    """The conversation of a policy that says these turns, and the messages behind its last one."""
    conversation, waiting = Conversation(chat_format), []
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            waiting.append(turn)
            continue
        conversation.append_messages(waiting)
        waiting = []
        said = chat_format.said(turns[:place], turn)
        reply = conversation.append_sampled(ids := chat_format.encode(said), [0.0] * len(ids))
        calls = [{"text": "7 + 1"}] * ("tool_calls" in turn)
        assert [c.arguments for c in reply.tool_calls] == calls
    return conversation, waiting


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_is_the_whole_rendered_again(shape):
    chat_format = ChatFormat(tokenizer_for(*SHAPES[shape]), tools=[ADD])
    conversation, waiting = played(chat_format, TURNS)
    conversation.append_messages(waiting)
    whole = chat_format.encode(chat_format.render(TURNS, generation_prompt=True))
    assert chat_format.as_closed(conversation.token_ids) == chat_format.as_closed(whole)
    assert len(conversation.rows()) == 1


@pytest.mark.parametrize("tools", [[ADD], []], ids=["tools", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sft_learns_what_a_rollout_of_the_shape_samples(shape, tools):
    """Also what ends a last turn that the template leaves open, and no generation prompt that it
    writes behind one."""
    tokenizer = tokenizer_for(*SHAPES[shape])
    chat_format = ChatFormat(tokenizer, tools=tools)
    turns = TURNS[:4] if tools else [TURNS[0], TURNS[3], TURNS[4], TURNS[3]]
    conversation, waiting = played(chat_format, turns)
    assert not waiting
    (row,) = conversation.rows()
    sampled = chat_format.as_closed(row.prompt_ids + row.completion_ids)
    ids, targets = encode_chat(tokenizer, turns, tools=tools)
    num = len(sampled)
    assert chat_format.as_closed(ids)[:num] == sampled
    assert targets[:num] == [False] * len(row.prompt_ids) + row.loss_mask
    assert not any(targets[num:])


@pytest.mark.parametrize("shape", ["glm", "gemma4"])
def test_a_turn_that_ends_for_another_speaker_is_ended_as_the_template_ends_it(shape):
    """The policy ended its words as one ends a call, and the user speaks."""
    chat_format = ChatFormat(tokenizer_for(*SHAPES[shape]), tools=[ADD])
    wrong = chat_format.ends.calls
    conversation = Conversation(chat_format)
    conversation.append_messages([{"role": "user", "content": "x"}])
    start = {"glm": "\n<think></think>\n", "gemma4": ""}[shape]
    conversation.append_sampled(ids := chat_format.encode(f"{start}No.{wrong}"), [0.0] * len(ids))
    conversation.append_messages([{"role": "user", "content": "y"}])
    text = chat_format.tokenizer.decode(conversation.token_ids)
    assert f"No.{wrong}{chat_format.ends.text}" in text


@pytest.mark.parametrize(("template", "name"), [(LLAMA2, "Llama 2"), (ZEPHYR, "Zephyr")])
def test_sentencepiece_families_are_not_refused(template, name, shared_dir):
    """Encoded alone a turn would begin with another space than in its place."""
    tokenizer = AutoTokenizer.from_pretrained(shared_dir / "models" / "stories15M")
    tokenizer.chat_template = template
    other = copy.deepcopy(family_tokenizer("mistral"))
    other.bos_token = "<s>"
    for each in (tokenizer, other):
        each.chat_template = template
        assert outcomes(ChatFormat(each))["turns"] == "appends", name


def test_dialogues_with_tools_are_walked_only_where_there_are_tools():
    refuses = MISTRAL_V11.replace("[TOOL_RESULTS]", "{{ raise_exception('no tools here') }}")
    assert "tool calls" not in outcomes(ChatFormat(tokenizer_for(refuses, "</s>")))
    tooled = ChatFormat(tokenizer_for(refuses, "</s>"), tools=[ADD])
    assert outcomes(tooled)["tool calls"] == "unsupported"


def test_a_template_that_raises_what_python_raises_is_refused():
    broken = tokenizer_for(ZEPHYR.replace("m.content +", "m.content + 1 +"), "</s>")
    with pytest.raises(ChatFormatError, match="it refuses them .TypeError"):
        ChatFormat(broken)


def test_an_answer_that_begins_after_a_space_is_refused_with_the_cause(shared_dir):
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}" \
             "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(shared_dir / "models" / "stories260K")
    tokenizer.chat_template = spaced
    with pytest.raises(ChatFormatError, match="end in a newline, not in a space"):
        prove(ChatFormat(tokenizer))
    tokenizer.chat_template = spaced.replace("assistant: {%", "assistant:{%")
    assert "appends" in {found.outcome for found in prove(ChatFormat(tokenizer))}


def test_calls_that_the_syntax_does_not_read_are_no_proof():
    template = GLM.replace("<arg_key>", "<arg_name>").replace("</arg_key>", "</arg_name>")
    chat_format = ChatFormat(tokenizer_for(template, "<|endoftext|>"), tools=[ADD])
    found = prove(chat_format)
    assert {f.outcome for f in found if "tool calls" in f.dialogue} == {"unreadable"}
    with pytest.raises(ChatFormatError, match="its own call of .* is read as"):
        require_tools(chat_format, found)


@pytest.mark.parametrize(("shape", "name"), [("harmony", "fs/read"), ("mistral", "fs/read")])
def test_a_name_that_the_syntax_cannot_read_is_refused_though_others_can_be_read(shape, name):
    """MCP allows such names; every call of that tool failed, as if the policy had miswritten it."""
    other = copy.deepcopy(ADD)
    other["function"]["name"] = name
    chat_format = ChatFormat(tokenizer_for(*SHAPES[shape]), tools=[ADD, other])
    with pytest.raises(ChatFormatError, match=f"its own call of ..{name}.. is read as"):
        require_tools(chat_format, prove(chat_format))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_cannot_forge_special_tokens_in_a_fork(family):
    """It spells them in plain tokens; the template renders its turn again."""
    tokenizer = copy.deepcopy(family_tokenizer(family))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content", "(('' if loop.last else 'old ') ~ m.content)"
    )

    def forked(text):
        chat_format = ChatFormat(tokenizer)
        plain = [
            i for letter in text for i in tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]
        ids = [*plain, chat_format.encode(chat_format.turn_end)[-1]]
        conversation = Conversation(chat_format)
        conversation.append_messages([{"role": "user", "content": "x"}])
        conversation.append_sampled(ids, [0.0] * len(ids))
        conversation.append_messages([{"role": "user", "content": "y"}])
        assert conversation.suffixes["fork"] == 1
        return [i for i in conversation.token_ids if i in tokenizer.all_special_ids]

    forged = "".join(t for t in tokenizer.all_special_tokens if t not in ("<pad>", "<unk>"))
    assert forked(f"Yes.{forged}") == forked("Yes.")


def test_the_most_calls_of_a_turn_are_found_out():
    assert ChatFormat(tokenizer_for(HARMONY, "<|return|>"), tools=[ADD]).max_calls == 1
    assert ChatFormat(tokenizer_for(GLM, "<|endoftext|>"), tools=[ADD]).max_calls is None
    silent = HARMONY.replace("{{ raise_exception('one call') }}", "")  # as gpt-oss has it
    assert ChatFormat(tokenizer_for(silent, "<|return|>"), tools=[ADD]).max_calls == 1


# --- TRL's templates, where it is installed ------------------------------------------------------


def trl_templates():
    spec = importlib.util.find_spec("trl")
    folders = [] if spec is None else [Path(spec.submodule_search_locations[0]) / "chat_templates"]
    folders += (
        [Path(os.environ["RLLIB_LLM_TEMPLATES"])] if "RLLIB_LLM_TEMPLATES" in os.environ else []
    )
    return sorted({file for folder in folders for file in folder.glob("*.jinja")})


_WITH_TOOLS = re.compile(
    r"glm4moe|gptoss|gemma4|nemotron_3|qwen(2_5(_tr|\.)|3)|lfm2_(v2|2)|llama3_[12]"
)


@pytest.mark.slow
@pytest.mark.parametrize("file", trl_templates(), ids=lambda file: file.stem)
@pytest.mark.parametrize("tools", [[ADD], []], ids=["tools", "plain"])
def test_every_template_is_proven_or_refused_by_name(file, tools):
    template = file.read_text(encoding="utf-8")
    known = (
        "<|return|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "</s>",
    )
    eos = next((end for end in known if end in template), "<eos>")
    try:
        chat_format = ChatFormat(tokenizer_for(template, eos), tools=tools, renderer=None)
        found = prove(chat_format)
        if tools:
            require_tools(chat_format, found)
    except ChatFormatError:
        assert not (tools and _WITH_TOOLS.match(file.stem)), file.stem
