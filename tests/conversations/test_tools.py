"""The bundled tools: what they answer, and what they are held to."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Literal

import pytest

from rllib_llm.conversations.tool_calls import ToolCall, parse_reply
from rllib_llm.envs.tools import PythonTool, SearchTool, Toolbox
from rllib_llm.examples.calculator import calculator
from rllib_llm.examples.lookup import Lookup, facts, sft_rows
from rllib_llm.examples.lookup import build_model as build_lookup_model
from rllib_llm.examples.twenty_questions import TwentyQuestions
from rllib_llm.shared.dotted import as_list
from rllib_llm.shared.errors import Problems
from tests.containment import needs_bwrap
from tests.conversations.scripted import roll
from tests.conversations.templates import family_tokenizer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("347*2958", "1026426"),
        ("-(2 + 3) ** 2", "-25"),
        ("7 / 2", "3.5"),
        ("6/3", "2"),
        ("7%4", "3"),
    ],
)
def test_the_calculator(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os')", "only numbers"),
        ("2 ** 2 ** 9", "powers must be at most 64"),
        ("9" * 201, "at most 200 characters"),
        ("(-8) ** 0.5", "must be a real number"),
        ("1 +", "no arithmetic expression"),
    ],
)
def test_what_the_calculator_does_not_do(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression)


class Served:
    """A tool with the schema of a stranger's server."""

    name = "find"

    def __init__(self, **properties):
        parameters = {"type": "object", "properties": properties}
        self.schema = {"type": "function", "function": {"name": "find", "parameters": parameters}}

    async def run(self, arguments):
        return arguments["word"]


@pytest.mark.parametrize(
    "kind",
    [{"type": "string", "pattern": r"^\p{L}+$"}, {"type": "string", "pattern": "^(?!a)"},
     {"$ref": "https://example.org/word"}, {"type": "word"}, {"enum": 3}],
    ids=["letters of JavaScript", "one that looks ahead", "another site", "no type", "no list"],
)  # fmt: skip
def test_a_schema_that_cannot_be_checked_refuses_no_call(kind):
    """Such a call made its rollout invalid, or the policy was told that it was to blame."""
    asked = ToolCall("find", {"word": "tree"}, "", "ok")
    assert asyncio.run(Toolbox([Served(word=kind)]).run(asked)).text == "tree"
    schemas = {"find": Served(word=kind).schema["function"]["parameters"]}
    text = "<tool_call><function=find><parameter=word>tree</parameter></function></tool_call>"
    (call,) = parse_reply(text, syntax="xml", tools=schemas).tool_calls
    assert (call.status, call.arguments) == ("ok", {"word": "tree"})


@pytest.mark.parametrize(
    ("pattern", "word", "fits"),
    [
        ("^(a+)+$", "a" * 1000, True),
        ("^(a+)+$", "a" * 1000 + "!", False),  # Python's takes 2^1000 steps
        (r"^\d{3}-\d{4}$", "555-0199", True),
        (r"^\d{3}-\d{4}$", "555-019", False),
        ("ree", "tree", True),  # it may stand anywhere
        ("^tree$", "tree\n", False),
    ],
)
def test_a_pattern_is_checked_in_time(pattern, word, fits):
    """Patterns were left to the tool."""
    kind = {"type": "string", "pattern": pattern}
    result = asyncio.run(
        Toolbox([Served(word=kind)]).run(ToolCall("find", {"word": word}, "", "ok"))
    )
    assert result.failure == ("" if fits else "invalid_arguments")
    assert fits or result.text.startswith("Error: arguments of 'find': ")


@pytest.mark.parametrize("others", ["additionalProperties", "unevaluatedProperties"])
def test_patterns_of_names_hold_up_nobody(others):
    """All rollouts waited for as long as Python looked for one in what the policy wrote."""
    found = Served()
    parameters = found.schema["function"]["parameters"]
    parameters.update({"patternProperties": {"^(a+)+$": {"type": "integer"}}, others: False})
    asked = ToolCall("find", {"word": "tree", "a" * 1000 + "!": 1}, "", "ok")
    assert asyncio.run(Toolbox([found]).run(asked)).text == "tree"


def times_out():
    """Looks at a data base."""
    raise TimeoutError("the data base has no place free")


def times_out_silently():
    """Looks at a data base."""
    raise TimeoutError


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (times_out, "Error: TimeoutError: the data base has no place free"),
        (times_out_silently, "Error: TimeoutError"),
    ],
)
def test_a_tool_s_own_time_out_is_told_in_its_own_words(tool, text):
    asked = ToolCall(tool.__name__, {}, "", "ok")
    result = asyncio.run(Toolbox([tool], timeout_s=30).run(asked))
    assert (result.text, result.failure) == (text, "timeout")


def python(code, **limits):
    asked = ToolCall("python", {"code": code}, "", "ok")
    return asyncio.run(Toolbox([PythonTool(**limits)]).run(asked))


@needs_bwrap
def test_python_says_what_a_program_prints():
    assert python("print(sum(range(10)))").text == "45"
    assert python("pass").text == "[no output]"
    failed = python("1 / 0").text
    assert "ZeroDivisionError" in failed and failed.endswith("[exit code 1]")


@needs_bwrap
def test_programs_are_held_to_their_limits():
    start = time.monotonic()
    assert python("while True: pass", timeout_s=0.5).failure == "timeout"
    assert python("import time; time.sleep(60)", timeout_s=0.5).failure == "timeout"
    assert time.monotonic() - start < 15
    assert "MemoryError" in python("x = bytearray(2**31)", memory_mb=512).text
    assert len(python("while True: print('x' * 999)", max_output=5000).text) < 6000


@needs_bwrap
def test_a_program_s_own_limit_holds_and_is_named():
    """A child in a session of its own, which holds the pipe, holds up nothing."""
    child = "import subprocess; subprocess.Popen(['setsid', 'sleep', '99'])"
    start = time.monotonic()
    result = python(f"{child}\nimport time; time.sleep(60)", timeout_s=1)
    assert result.text == "Error: the program did not end within 1 s"
    assert result.failure == "timeout" and time.monotonic() - start < 6
    start = time.monotonic()
    assert python(f"print('kept'); {child}", timeout_s=20).text == "kept"
    assert time.monotonic() - start < 15


@needs_bwrap
def test_programs_see_nothing_of_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_SECRET", "hush")
    code = f"""
import os, pathlib, socket
for attempt in (
    lambda: pathlib.Path({str(tmp_path / "made")!r}).write_text("x"),
    lambda: socket.create_connection(("127.0.0.1", 80)),
    lambda: pathlib.Path("/proc/{os.getpid()}/environ").read_text(),
):
    try:
        print(attempt())
    except OSError as error:
        print(type(error).__name__)
print("MY_SECRET" in os.environ, pathlib.Path("own").write_text("mine"))
"""
    lines = python(code, timeout_s=20).text.splitlines()
    # There is no such folder, a network of its own where nobody listens, and no such process.
    assert lines == ["FileNotFoundError", "ConnectionRefusedError", "FileNotFoundError", "False 4"]


@needs_bwrap
def test_a_program_that_cannot_be_started_is_not_the_policy_s_mistake():
    # The kernel refuses arguments of more than 128 KiB, as it refuses processes above a limit.
    result = python("print(1)", writable=["/x" * 100_000])
    assert result.failure == "unavailable" and "no process can be started" in result.text


@needs_bwrap
def test_programs_wait_for_a_place_and_are_not_late_for_it():
    tool = PythonTool(timeout_s=20, max_processes=1)
    asked = ToolCall("python", {"code": "import time; time.sleep(0.5); print(1)"}, "", "ok")

    async def both():
        box = Toolbox([tool], timeout_s=0.3)  # of tools without a limit of their own
        return await asyncio.gather(box.run(asked), box.run(asked))

    assert [result.text for result in asyncio.run(both())] == ["1", "1"]


def function_of(function: str) -> str:
    """Says its argument.

    Args:
        function: anything.
    """
    return function


def test_an_argument_may_be_called_function():
    asked = ToolCall("function_of", {"function": "f"}, "", "ok")
    assert asyncio.run(Toolbox([function_of]).run(asked)).text == "f"


def maybe(text: str | None = None, kind: Literal["a", "b"] | None = None) -> str:
    """Says both.

    Args:
        text: anything.
        kind: of it.
    """
    return f"{text} {kind}"


def test_optional_arguments_take_null():
    """transformers says `nullable` of them, which is no word of JSON Schema."""
    asked = ToolCall("maybe", {"text": None, "kind": None}, "", "ok")
    assert asyncio.run(Toolbox([maybe]).run(asked)).text == "None None"
    wrong = ToolCall("maybe", {"kind": "c"}, "", "ok")
    assert asyncio.run(Toolbox([maybe]).run(wrong)).failure == "invalid_arguments"


@pytest.mark.parametrize("name", ["txet", "self", ""])
def test_an_argument_that_a_function_lacks_is_the_policy_s_mistake(name):
    """And no failure of the tool, which `tool_errors: invalid` would leave out."""
    result = asyncio.run(Toolbox([maybe]).run(ToolCall("maybe", {name: "x"}, "", "ok")))
    assert result.failure == "invalid_arguments"
    assert result.text == (
        f"Error: arguments of 'maybe': got an unexpected keyword argument {name!r}."
    )


def test_search_ranks_passages_by_rare_words():
    texts = {
        "rivers": "The Rhine is long.\n\nThe Aare flows through Bern.",
        "cities": "Bern is old.",
    }
    tool = SearchTool(texts, num_results=2)
    assert [title for title, _ in tool.search("Where does the Aare flow?")][0] == "rivers"
    assert tool.search("Aare")[0][1] == "The Aare flows through Bern."
    assert asyncio.run(tool.run({"query": "zebra"})) == "Nothing found."
    with pytest.raises(ValueError, match="folder=.* must hold texts"):
        SearchTool({})


def test_search_reads_a_folder(tmp_path):
    (tmp_path / "a.md").write_text("Apples are red.")
    (tmp_path / "b.bin").write_bytes(b"\x00")
    (tmp_path / "folder.md").mkdir()
    assert SearchTool(tmp_path).search("apples") == [("a", "Apples are red.")]


def test_search_keeps_files_of_one_name_apart(tmp_path):
    for folder, text in (("one", "Apples are red."), ("two", "Plums are blue.")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text(f"\ufeff{text}", encoding="utf-8")
    tool = SearchTool(tmp_path)
    assert tool.search("apples") == [("one/README", "Apples are red.")]
    assert tool.search("plums") == [("two/README", "Plums are blue.")]
    (tmp_path / "old.txt").write_bytes("Äpfel".encode("latin-1"))
    with pytest.raises(ValueError, match=r"old.txt' must be text in UTF-8.*iconv -f WINDOWS-1252"):
        SearchTool(tmp_path)


def untyped(x):
    """Says x."""


def nameless(x: int, /, *more: int) -> int:
    """Says x.

    Args:
        x: it.
        more: of it.
    """
    return x


@pytest.mark.parametrize(
    "one", ["rllib_llm.examples.calculator.calculator", calculator, PythonTool(backend="process")]
)
def test_one_tool_counts_as_a_list_of_one(one):
    assert as_list(one) == as_list([one]) == [one]
    assert Toolbox(as_list(one)).tools.keys() < {"calculator", "python"}


def test_no_tools_are_an_empty_list():
    assert as_list(None) == as_list("") == as_list(()) == []


def nowhere(x: NoSuch):  # noqa: F821
    """Looks.

    Args:
        x: what
    """


def yields(x: int):
    """Counts.

    Args:
        x: how far
    """
    yield from range(x)


@pytest.mark.parametrize(
    "schema", [None, {}, {"function": None}, {"type": "function", "function": {"name": "seek"}}]
)
def test_a_tool_object_whose_schema_names_another_is_refused(schema):
    """Its calls failed by KeyErrors, or as those of a tool that is not there."""
    found = Served()
    found.schema = schema
    with pytest.raises(Problems, match="tools=.* must have a schema .*'name': 'find'"):
        Toolbox([found])


class NeedsAService:
    def __init__(self):
        raise KeyError("SERVICE")


def test_a_class_of_tools_that_raises_is_told_with_its_setting():
    with pytest.raises(Problems, match="tools=.*NeedsAService.* arguments: KeyError: 'SERVICE'"):
        Toolbox([NeedsAService])


def test_functions_that_can_be_no_tools_are_refused():
    with pytest.raises(Problems, match=r"tool 'nameless' must take \['x', 'more'\] by name"):
        Toolbox([nameless])
    with pytest.raises(Problems, match="tool 'untyped' must have type hints and a Google-style"):
        Toolbox([untyped])
    with pytest.raises(Problems, match="tool 'nowhere' must have type hints .*'NoSuch'"):
        Toolbox([nowhere])
    with pytest.raises(Problems, match="tool 'yields' must return its result: it yields"):
        Toolbox([yields])
    with pytest.raises(Problems, match="must have names of their own"):
        Toolbox([calculator, calculator])
    with pytest.raises(Problems, match="must be functions, their dotted paths"):
        Toolbox([3])


def test_what_is_looked_up_stands_in_the_text_alone():
    env = Lookup({"num_facts": 50, "shuffle": False, "split": "train"})
    try:
        task = env.tasks.rows(0, 1)[0]
        key, answer = task.prompt.removesuffix("?"), task.columns["answer"]
        search = f'<tool_call>{{"name": "search", "arguments": {{"query": "{key}"}}}}</tool_call>'
        attempts, judged, _ = roll(env, search, answer, num_prompts=1, num_completions=1)
        _, guessed, _ = roll(env, answer[::-1] + "1", num_prompts=1, num_completions=1)
    finally:
        env.close()
    contents = [message["content"] for message in attempts[0].conversation.messages]
    assert contents == [f"{key}?", "", f"{key}: {answer}", answer]
    assert judged.columns["scores"].tolist() == [1.0]
    assert guessed.columns["scores"].tolist() == [0.0]


def test_what_is_learnt_first_tells_no_fact_of_the_text():
    told, rows = facts(50), sft_rows(100, call_share=0.25)
    searching = [row["messages"] for row in rows if len(row["messages"]) == 4]
    assert len(told) == 50 and len(searching) == 25
    pairs = {(m[0]["content"].removesuffix("?"), m[-1]["content"]) for m in searching}
    assert not pairs & set(told.items())
    _, tokenizer = build_lookup_model()
    text = tokenizer.apply_chat_template(searching[0], tools=rows[0]["tools"], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def test_twenty_questions():
    env = TwentyQuestions(
        {"tokenizer": family_tokenizer("chatml"), "shuffle": False, "highest": 10}
    )
    try:
        secret = env.tasks.rows(0, 1)[0].columns["secret"]
        says = ["11", "0", "what?", str(secret)]
        attempts, judged, _ = roll(env, *says, num_prompts=1, num_completions=1)
    finally:
        env.close()
    said = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "user"]
    assert said[1:] == ["Lower.", "Higher.", "Say a number.", "Right."]
    # 1 for the number and 0.02 for each of three questions before.
    assert judged.columns["scores"].tolist() == pytest.approx([0.94])
