"""A call that has to be made is what the chat template itself writes of one, in each syntax.

The right values are the template's: what it renders of a turn with a call is a sentence of the
grammar, up to the token that ends the turn, and is read as that call.
"""

from __future__ import annotations

import json

import llguidance
import llguidance.hf
import pytest
from llguidance import LLMatcher

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.serving.schemas import ApiError, NamedTool, ToolSchema
from rllib_llm.serving.tool_grammars import behind_thoughts, call_grammar
from tests.conversations.templates import CHATML, LLAMA3, MISTRAL
from tests.conversations.test_template_shapes import (
    COHERE,
    GEMMA4,
    GLM,
    HARMONY,
    MISTRAL_V11,
    tokenizer_for,
)

_START = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
)
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen3-Coder's, and LFM2's.
XML = _START + (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
) + _END
PYTHONIC = _START + (
    "{% for c in m.tool_calls or [] %}<|tool_call_start|>[{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]<|tool_call_end|>{% endfor %}"
) + _END
GEMMA4_VALUES = GEMMA4.replace(
    '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}',
    '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    '{% for a, b in v.items() %}{{ a }}:{{ b | tojson }}{% endfor %}}{% else %}{{ v | tojson }}'
    "{% endif %}{% if not loop.last %},{% endif %}{% endfor %}",
)
GLM_VALUES = GLM.replace(
    "{{ v }}</arg_value>", "{{ v if v is string else v | tojson }}</arg_value>"
)
TEMPLATES = {
    "hermes": (CHATML, "<|im_end|>"), "xml": (XML, "<|im_end|>"),
    "glm": (GLM_VALUES, "<|endoftext|>"), "mistral": (MISTRAL, "</s>"),
    "named mistral": (MISTRAL_V11.replace("[CALL_ID]{{ c.id }}", ""), "</s>"),
    "llama3": (LLAMA3, "<|eot_id|>"), "harmony": (HARMONY, "<|return|>"),
    "gemma4": (GEMMA4_VALUES, "<eos>"), "pythonic": (PYTHONIC, "<|im_end|>"),
    "cohere": (COHERE, "<|END_OF_TURN_TOKEN|>"),
}  # fmt: skip
PARAMETERS = {
    "type": "object", "required": ["text", "op", "at"], "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}},
                        "required": ["x"], "additionalProperties": False}},
    "properties": {"text": {"type": "string"}, "op": {"enum": ["+", 3]},
                   "at": {"$ref": "#/$defs/point"}, "deep": {"type": ["boolean", "null"]}},
}  # fmt: skip
SPEC = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
TOOLS = [ToolSchema.model_validate(SPEC)]
NAMED = NamedTool.model_validate({"type": "function", "function": {"name": "add"}})
ARGUMENTS = {"text": "if a < b: c, d: 'é'", "op": "+", "at": {"x": 7}}
USER = {"role": "user", "content": "x"}


def matches(tokenizer, grammar, ids) -> bool:
    tokens = llguidance.hf.from_tokenizer(tokenizer, eos_token=tokenizer.eos_token_id)
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def format_of(name, opens="") -> ChatFormat:
    template, eos = TEMPLATES[name]
    if opens and template.endswith("{% endif %}"):
        template = template.removesuffix("{% endif %}") + opens + "{% endif %}"
    elif opens:
        template += opens  # what always writes a generation prompt, or none
    return ChatFormat(tokenizer_for(template, eos), tools=[SPEC])


def written(chat_format, arguments) -> list[int]:
    """The template's own call, with the token that ends it unless that is EOS."""
    function = {"name": "add", "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    said = chat_format.said([USER], turn)
    assert said is not None
    said = said[said.index(start_of_calls(chat_format)) :]
    return chat_format.encode(said.removesuffix(chat_format.tokenizer.eos_token))


def start_of_calls(chat_format) -> str:
    starts = {"glm": "<tool_call>", "cohere": "<|START_ACTION|>", "hermes": "<tool_call>",
              "gemma4": "<|tool_call>", "mistral": "[TOOL_CALLS]"}  # fmt: skip
    return starts.get(chat_format.syntax, "")


@pytest.mark.parametrize("more", [{}, {"deep": True}])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_s_own_call_is_what_has_to_be_written(name, more):
    chat_format = format_of(name)
    assert chat_format.syntax == name.rpartition(" ")[2]
    ids = written(chat_format, {**ARGUMENTS, **more})
    for choice, one in ((NAMED, True), ("required", True), ("required", False)):
        grammar = call_grammar(chat_format, TOOLS, choice, one)
        assert matches(chat_format.tokenizer, grammar, ids), chat_format.tokenizer.decode(ids)
    reply = chat_format.parse(ids)
    assert [c.arguments for c in reply.tool_calls] == [{**ARGUMENTS, **more}]
    # Words alone are no call.
    assert not matches(chat_format.tokenizer, grammar, chat_format.encode("No."))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_has_to_be_made_behind_the_thoughts_that_the_prompt_opens(name):
    chat_format = format_of(name, "<think>")
    prompt = chat_format.prompt_ids([USER])
    end = chat_format.thoughts_end(prompt)
    assert end == "</think>"
    call = written(format_of(name), ARGUMENTS)
    grammar = behind_thoughts(call_grammar(chat_format, TOOLS, NAMED, True), end, chat_format)
    told = format_of(name).tokenizer.decode(call)
    ids = chat_format.encode("I < you, {so}.</think>\n\n" + told)
    assert matches(chat_format.tokenizer, grammar, ids)
    assert not matches(chat_format.tokenizer, grammar, call)
    reply = chat_format.parse(ids, prompt_ids=prompt)
    assert reply.reasoning == "I < you, {so}."
    assert [c.arguments for c in reply.tool_calls] == [ARGUMENTS]


def test_a_response_format_is_followed_behind_the_thoughts_too():
    chat_format = format_of("hermes", "<think>")
    schema = LLMatcher.grammar_from_json_schema(json.dumps({"type": "boolean"}))
    for answer in (schema, 'start: "true"', LLMatcher.grammar_from_regex("t.ue")):
        grammar = behind_thoughts(answer, "</think>", chat_format)
        ids = chat_format.encode("Well.</think>\n\ntrue")
        assert matches(chat_format.tokenizer, grammar, ids)
        assert not matches(chat_format.tokenizer, grammar, chat_format.encode("true"))
        assert chat_format.read("Well.</think>\n\ntrue", thoughts_end="</think>").content == "true"


def test_a_name_that_the_syntax_cannot_write_is_refused():
    for name, wrong in (("pythonic", "get-it"), ("pythonic", "from"), ("harmony", "a b")):
        chat_format = format_of(name)
        tool = ToolSchema.model_validate({"type": "function", "function": {"name": wrong}})
        with pytest.raises(ApiError, match="must be a name that calls"):
            call_grammar(chat_format, [tool], "required", True)
