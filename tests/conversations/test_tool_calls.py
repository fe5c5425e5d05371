"""Replies taken apart: what counts as a call, and what does not."""

from __future__ import annotations

import json

import pytest

from rllib_llm.conversations.tool_calls import SYNTAXES, parse_reply, syntax_of
from tests.conversations.templates import TEMPLATES

CALL = '{"name": "add", "arguments": {"a": 1}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "llama3": CALL.replace("arguments", "parameters"),
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "harmony": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "pythonic": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "cohere": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>',
}
OPEN_ENDED = ("mistral", "llama3", "harmony")  # no mark says that a call is whole


def parsed(text, syntax="hermes", **options):
    return parse_reply(text, syntax=syntax, **options)


@pytest.mark.parametrize("syntax", WRITTEN)
def test_a_call_is_read_in_every_syntax(syntax):
    (call,) = parsed(WRITTEN[syntax], syntax).tool_calls
    assert (call.name, call.arguments, call.status) == ("add", {"a": 1}, "ok")
    assert call.id == "call00000" and len(call.id) == 9  # as Mistral's template wants them


@pytest.mark.parametrize("syntax", WRITTEN)
def test_a_truncated_tool_call_is_never_complete(syntax):
    whole = WRITTEN[syntax]
    for end in range(len(whole) + 1):
        for finish in ("length", "aborted", "stop"):
            calls = parsed(whole[:end], syntax, finish=finish).tool_calls
            # Cut anywhere before its last character no call is complete, however sampling ended;
            # whole but not ended by the policy, only a closing mark says that nothing is missing.
            is_whole = end == len(whole) and (finish == "stop" or syntax not in OPEN_ENDED)
            assert [call.status for call in calls if call.status == "ok"] == ["ok"] * is_whole


@pytest.mark.parametrize(
    ("syntax", "text", "arguments"),
    [
        ("mistral", '[TOOL_CALLS]add{"a": 1}', [{"a": 1}]),  # v11
        ("mistral", '[TOOL_CALLS]add[CALL_ID]call00001[ARGS]{"a": 1}', [{"a": 1}]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}',
         [{"a": 1}, {"a": 2}]),  # v13
        ("harmony", '<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>'
         'commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', [{"a": 1}]),
        ("gemma4", '<|tool_call>call:add{a:<|"|>{x: "1"}<|"|>,b:[1,true],c:{d:null}}<tool_call|>',
         [{"a": '{x: "1"}', "b": [1, True], "c": {"d": None}}]),
        ("gemma4", "<|tool_call>call:add{}<tool_call|>", [{}]),
        ("pythonic", "<|tool_call_start|>[add(a='x', b=[1, None]), add(a=2)]<|tool_call_end|>",
         [{"a": "x", "b": [1, None]}, {"a": 2}]),
        ("pythonic", "<|tool_call_start|>[add(a=open('x'))]<|tool_call_end|>", [None]),
        # What templates write of nested values: Jinja's None, JSON's words, lines as they are.
        ("gemma4", "<|tool_call>call:add{a:[1,None,true]}<tool_call|>", [{"a": [1, None, True]}]),
        ("pythonic", "<|tool_call_start|>[add(a={\"b\": [null, true]}, c='x\ny')]<|tool_call_end|>",
         [{"a": {"b": [None, True]}, "c": "x\ny"}]),
        ("glm", "<tool_call>add\n</tool_call>", [{}]),
    ],
)  # fmt: skip
def test_a_call_is_read_in_the_forms_of_its_family(syntax, text, arguments):
    assert [call.arguments for call in parsed(text, syntax).tool_calls] == arguments


@pytest.mark.parametrize("written", ["123", "true", '{"a": 1}', '"quoted"', "null", "None"])
@pytest.mark.parametrize("syntax", ["xml", "glm"])
def test_a_text_that_looks_like_json_stays_a_text_where_the_schema_wants_one(syntax, written):
    form = {
        "xml": "<tool_call><function=f><parameter=x>\n{}\n</parameter></function></tool_call>",
        "glm": "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>",
    }[syntax]
    text = form.replace("{}", written)
    texts = {"f": {"properties": {"x": {"type": "string"}}}}
    assert parsed(text, syntax, tools=texts).tool_calls[0].arguments == {"x": written}
    any_value = parsed(text, syntax, tools={"f": {}}).tool_calls[0].arguments["x"]
    assert any_value == (None if written == "None" else json.loads(written))


OPTIONAL = [  # a text or nothing: as transformers and as pydantic write it
    {"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]}, {"$ref": "#/$defs/optional"},
]  # fmt: skip


@pytest.mark.parametrize("schema", OPTIONAL, ids=str)
@pytest.mark.parametrize(
    ("written", "value"),
    [("123", "123"), ("true", "true"), ('"quoted"', '"quoted"'), ("null", None), ("None", None)],
)
def test_an_optional_text_is_a_text_or_nothing(schema, written, value):
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"
    kinds = {"properties": {"x": schema}, "$defs": {"optional": OPTIONAL[1]}}
    assert parsed(text, "glm", tools={"f": kinds}).tool_calls[0].arguments == {"x": value}


@pytest.mark.parametrize(
    "value",
    ["{(1, 2): 3}", "{[1]: 2}", "{1: 2}", "{1, 2}", "b'x'", "1j", "...",
     "[" * 80 + "]" * 80],
)  # fmt: skip
def test_arguments_that_no_json_can_hold_are_not_read(value):
    """A template could not write them, and Python's own errors are no reply."""
    text = f"<|tool_call_start|>[f(x={value})]<|tool_call_end|>"
    (call,) = parsed(text, "pythonic").tool_calls
    assert (call.status, call.arguments) == ("invalid_json", None)


END_MARKS = (
    'x = "</tool_call> </parameter> </arg_value>"\n[TOOL_CALLS] </function> <|END_ACTION|> <|end|>'
    " <tool_call|> <|tool_call_end|>"
)
RM = {  # a call that an argument quotes
    "xml": "<tool_call><function=rm><parameter=path>\n/\n</parameter></function></tool_call>",
    "glm": "<tool_call>rm<arg_key>path</arg_key><arg_value>/</arg_value></tool_call>",
    "hermes": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "mistral": "[TOOL_CALLS]rm{}",
    "harmony": "<|start|>assistant to=functions.rm<|channel|>commentary<|message|>{}<|end|>",
    "gemma4": "<|tool_call>call:rm{}<tool_call|>",
    "pythonic": "<|tool_call_start|>[rm()]<|tool_call_end|>",
    "cohere": '<|START_ACTION|>[{"tool_name": "rm"}]<|END_ACTION|>',
}
MARKS = f"{END_MARKS} <tool_call> <|START_RESPONSE|> {' '.join(RM.values())} {RM['hermes']}"
AS_JSON = json.dumps({"text": MARKS})


@pytest.mark.parametrize(
    ("syntax", "written"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + AS_JSON + "}</tool_call>"),
        ("xml", "<tool_call>\n<function=f>\n<parameter=text>\n" + END_MARKS + "\n</parameter>\n"
         "</function>\n</tool_call>"),
        ("glm", f"<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{END_MARKS}</arg_value>\n"
         "</tool_call>"),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{AS_JSON}"),
        ("harmony", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
         f"{AS_JSON}<|end|>"),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": ' + AS_JSON + "}]"
         "<|END_ACTION|>"),
        ("gemma4", f'<|tool_call>call:f{{text:<|"|>{MARKS}<|"|>}}<tool_call|>'),
        ("pythonic", f"<|tool_call_start|>[f(text={MARKS!r})]<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_arguments_may_quote_the_marks_around_them(syntax, written):
    reply = parsed(f"{written}\n{written}", syntax)
    text = END_MARKS if syntax in ("xml", "glm") else MARKS
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", {"text": text})] * 2
    assert reply.content == ""


XML_WRITE = (
    "<tool_call><function=write><parameter=content>\n{}\n</parameter></function></tool_call>"
)
GLM_WRITE = "<tool_call>write<arg_key>content</arg_key><arg_value>{}</arg_value></tool_call>"
NOT_JSON = '<tool_call>{{"name": "write", "arguments": {{"content": "say "so" {}"}}}}</tool_call>'
BROKEN = {
    "hermes": NOT_JSON,
    "mistral": '[TOOL_CALLS]write{{"content": "say "so" {}"}}',
    "harmony": ' to=functions.write<|message|>{{"content": "say "so" {}"}}<|end|>',
    "gemma4": "<|tool_call>call:write{{content: say so {}}}<tool_call|>",
    "pythonic": "<|tool_call_start|>[write(content='it's {}')]<|tool_call_end|>",
    "cohere": '<|START_ACTION|>[{{"tool_name": "write", "parameters": "{}"]<|END_ACTION|>',
    "xml": XML_WRITE,  # neither is broken, but nothing says where a text ends that quotes a call
    "glm": GLM_WRITE,
}


@pytest.mark.parametrize("before", ["", "</tool_call> ", "<tool_call> "])
@pytest.mark.parametrize("syntax", BROKEN)
def test_a_call_quoted_in_arguments_that_cannot_be_read_is_not_run(syntax, before):
    quoted = f"{before}{RM[syntax]} {RM[syntax]}"
    reply = parsed(f"So. {BROKEN[syntax].format(quoted)} Done.", syntax)
    (call,) = reply.tool_calls
    assert (call.arguments, call.name in ("", "write")) == (None, True)
    assert call.status in ("invalid_json", "invalid_arguments")
    assert quoted in call.raw and "rm" not in reply.content


@pytest.mark.parametrize("syntax", ["hermes", "xml", "glm", "gemma4", "pythonic", "cohere"])
def test_a_call_cut_inside_an_argument_that_quotes_its_end_is_truncated(syntax):
    end = WRITTEN[syntax][WRITTEN[syntax].rindex("<") :]
    begin = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"x": "a ',
        "xml": "<tool_call><function=f><parameter=x>\na ",
        "glm": "<tool_call>f<arg_key>x</arg_key><arg_value>a ",
        "gemma4": '<|tool_call>call:f{x:<|"|>a ',
        "pythonic": '<|tool_call_start|>[f(x="a ',
        "cohere": '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": "a ',
    }[syntax]
    for finish, status in (("length", "truncated"), ("stop", "invalid")):
        reply = parsed(f"Well. {begin}{end} b", syntax, finish=finish)
        (call,) = reply.tool_calls
        assert call.status.startswith(status) and call.arguments is None
        assert (reply.content, call.raw) == ("Well.", f"{begin}{end} b")


def test_neither_a_call_without_its_end_nor_the_one_after_it_is_run():
    """The second may as well be what the first one's argument quotes."""
    for syntax, lost in (
        ("xml", "</function>"), ("xml", "</parameter>\n"), ("xml", "</function>\n</tool_call>"),
        ("xml", "\n</tool_call>"), ("glm", "</arg_value>"), ("glm", "\n</tool_call>"),
    ):  # fmt: skip
        broken = WRITTEN[syntax].replace(lost, "")
        (call,) = parsed(f"{broken}\n{WRITTEN[syntax]}", syntax).tool_calls
        assert (call.status, call.arguments) == ("invalid_arguments", None), lost


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("syntax", "text"),
    [("xml", "<tool_call><function=f>" + "<parameter=a>" * 20_000 + "</function></tool_call>"),
     ("xml", "<tool_call><function=f>" + "<parameter=a></parameter>b" * 20_000
      + "</function></tool_call>"),
     ("xml", "<tool_call>x</tool_call>" * 200_000),
     ("glm", "<tool_call>f" + "<arg_key>" * 20_000 + "</tool_call>"),
     ("mistral", "[TOOL_CALLS]f" + " " * 200_000),
     ("mistral", "[TOOL_CALLS]a{" * 300_000),
     ("hermes", "<tool_call>{</tool_call>" * 200_000),
     ("harmony", " to=f<|message|>{<|start|>assistant" * 100_000)],
    ids=["no end", "no further argument", "no function", "no value", "spaces", "no object",
         "no JSON", "no message"],
)  # fmt: skip
def test_marks_by_the_thousand_are_read_at_once(syntax, text):
    (call,) = parsed(text, syntax).tool_calls
    bad = ("invalid_arguments", "missing_name") if syntax in ("xml", "glm") else ("invalid_json",)
    assert call.status in bad


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("syntax", "written"),
    [("hermes", '<tool_call>{"name": "f"}</tool_call>'), ("glm", "<tool_call>f</tool_call>"),
     ("xml", "<tool_call><function=f></function></tool_call>"), ("mistral", "[TOOL_CALLS]f{}"),
     ("llama3", '{"name": "f"}; '), ("gemma4", "<|tool_call>call:f{}<tool_call|>"),
     ("harmony", " to=f<|message|>{}<|end|><|start|>assistant")],
)  # fmt: skip
def test_whole_calls_by_the_thousand_are_read(syntax, written):
    calls = parsed(written * 10_000, syntax).tool_calls
    assert {(call.name, call.status) for call in calls} == {("f", "ok")} and len(calls) == 10_000


@pytest.mark.parametrize("depth", [65, 500, 900, 5000])
def test_arguments_nested_too_deep_are_not_read(depth):
    """The templates' own filters would end in a RecursionError."""
    nested = '{"a":' * depth + "1" + "}" * depth
    (call,) = parsed(f"[TOOL_CALLS]f{nested}", "mistral").tool_calls
    assert (call.status, call.arguments) == ("invalid_json", None)


@pytest.mark.parametrize("value", ['"\\ud800"', '{"\\udfff": 1}', "NaN", "-Infinity", "1e999"])
def test_halves_of_characters_and_endless_numbers_are_not_read(value):
    """No answer in JSON can hold them."""
    for text, syntax in (
        (f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>', "hermes"),
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {{"x": {value}}}}}]', "mistral"),
    ):
        (call,) = parsed(text, syntax).tool_calls
        assert (call.status, call.arguments) == ("invalid_json", None)
        call.raw.encode()
    (call,) = parsed('<tool_call>{"name": "\\ud800"}</tool_call>', "hermes").tool_calls
    assert (call.status, call.name) == ("invalid_json", "")


def test_without_tools_an_answer_in_json_is_an_answer():
    for syntax, text in WRITTEN.items():
        reply = parsed(text, syntax, reads_calls=False)
        assert reply.tool_calls == () and "1" in reply.content, syntax


def test_calls_beyond_the_most_are_told_apart():
    reply = parsed(f"{WRITTEN['llama3']}; {WRITTEN['llama3']}", "llama3", max_calls=1)
    assert [call.status for call in reply.tool_calls] == ["ok", "too_many_calls"]
    assert len(reply.as_message()["tool_calls"]) == 1


def test_several_calls_and_the_words_between_them():
    text = f"First. {WRITTEN['hermes']} Then. <tool_call>{{oops</tool_call>"
    reply = parsed(text, first_call=3)
    assert reply.content == "First.  Then."
    assert [(c.status, c.id) for c in reply.tool_calls] == [
        ("ok", "call00003"), ("invalid_json", "call00004"),
    ]  # fmt: skip
    message = reply.as_message()
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert "<tool_call>{oops</tool_call>" in message["content"]  # not lost, and not a call
    two = parsed(f"{WRITTEN['llama3']}; {WRITTEN['llama3']}", "llama3").tool_calls
    assert [call.status for call in two] == ["ok", "ok"]


def test_calls_inside_thoughts_are_thoughts():
    reply = parsed(f"<think>maybe {WRITTEN['hermes']}</think>No.")
    assert (reply.content, reply.tool_calls) == ("No.", ())
    assert reply.reasoning.startswith("maybe")
    unended = parsed("still thinking", thoughts_end="</think>")
    assert (unended.content, unended.reasoning) == ("", "still thinking")


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ('{"arguments": {}}', "missing_name"),
        ("[1, 2]", "missing_name"),
        ('{"name": "add", "arguments": [1]}', "invalid_arguments"),
        ('{"name": "add", "arguments": "{"}', "invalid_json"),
        ('{"name": "sub", "arguments": {}}', "unknown_tool"),
        (json.dumps({"name": "add", "arguments": '{"a": 1}'}), "ok"),  # as OpenAI writes them
    ],
)
def test_what_is_wrong_with_a_call_is_told(call, status):
    (found,) = parsed(f"<tool_call>{call}</tool_call>", tools={"add"}).tool_calls
    assert found.status == status


def test_the_syntax_is_what_the_template_writes():
    assert {name: syntax_of(text) for name, text in TEMPLATES.items()} == {
        "chatml": "hermes", "qwen3": "hermes", "gemma": "hermes", "llama3": "llama3",
        "mistral": "mistral",
    }  # fmt: skip
    assert syntax_of("{{ messages }}") == "none"
    with pytest.raises(AssertionError, match="yaml"):
        parsed("", "yaml")
    assert set(WRITTEN) | {"none"} == set(SYNTAXES)


def test_integers_that_python_cannot_write_are_not_read():
    """In base 16 it reads them all the same; the chat template then failed to write the call."""
    text = f"<|tool_call_start|>[add(a=0x{'f' * 5000})]<|tool_call_end|>"
    (call,) = parsed(text, "pythonic").tool_calls
    assert (call.arguments, call.status) == (None, "invalid_json")


PERSON = '{"name": "Ann", "age": 30}'
ADD = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (PERSON, []), ('{"name": "Ann"}', []), (f"{PERSON[:-1]}, ", []), (f"{PERSON}; {ADD}", []),
        ('{"name": ["add"]}', []), ('{"title": "x", "parameters": {"name": "add"}}', []),
        ("{", []), ('{"name": "Ann", "a', []), ('["name", "parameters"]', []),
        (ADD, ["ok"]), (ADD.replace("parameters", "arguments"), ["ok"]),
        ('{"name": "add"}', ["ok"]),
        (f"{ADD};\n{ADD}", ["ok", "ok"]), (f"{ADD} {PERSON}", ["ok", "unknown_tool"]),
        (ADD[:-1], ["invalid_json"]), (f"{ADD} and so on", ["ok", "invalid_json"]),
        (ADD.replace("add", "sub"), ["unknown_tool"]),
        (f"<|python_tag|>{PERSON}", ["unknown_tool"]),
        ('<|python_tag|>{"name": "add"', ["invalid_json"]),
    ],
)  # fmt: skip
def test_an_answer_in_json_is_no_call_under_llama_s_syntax(text, statuses):
    reply = parsed(text, "llama3", tools={"add": {}})
    assert [call.status for call in reply.tool_calls] == statuses
    assert reply.content == ("" if statuses else text.strip())
    assert parsed(text, "llama3", tools={"add"}, finish="length").content == reply.content


@pytest.mark.parametrize("arguments", ["null", '""', '" "', '"null"', '"{}"', "{}"])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("syntax", ["hermes", "mistral", "llama3", "cohere"])
def test_arguments_that_are_empty_are_none(syntax, key, arguments):
    """As clients write them, and as the server reads them."""
    call = f'{{"name": "f", "{key}": {arguments}}}'
    text = {"hermes": f"<tool_call>{call}</tool_call>", "mistral": f"[TOOL_CALLS][{call}]",
            "llama3": call, "cohere": f"<|START_ACTION|>[{call}]<|END_ACTION|>",
            }[syntax]  # fmt: skip
    (found,) = parsed(text, syntax).tool_calls
    assert (found.status, found.arguments) == ("ok", {})


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("syntax", "quote"), [("hermes", '"'), ("pythonic", '"'), ("pythonic", "'"), ("cohere", '"')]
)
def test_a_lone_backslash_in_an_open_text_is_read_at_once(syntax, quote):
    text = WRITTEN[syntax][: WRITTEN[syntax].index("1")] + f"\\{quote}" * 200_000 + "\\"
    (call,) = parsed(text, syntax).tool_calls
    assert (call.status, call.arguments) == ("truncated", None)
