"""Files as other programs write them, and rollouts as later stages learn from them."""

from __future__ import annotations

import json
import warnings

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rllib_llm.data.encoding import encode_chat, vocabulary_hash
from rllib_llm.data.preferences import PairSource, PromptedPairSource
from rllib_llm.data.sources import load_rows
from rllib_llm.data.texts import TextSource
from rllib_llm.envs.prompts import PromptSource
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.templates import ADD, CHATML, family_tokenizer
from tests.tiny_models import byte_tokenizer


def rows_of(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(load_rows(str(path)))


# --- CSV and TSV ---------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_meant(tmp_path):
    text = 'prompt,answer,score,id,ok\n"1, 2\nor 3?",7,0.5,007,true\n5,"say ""x""",1,010,False\n'
    assert rows_of(tmp_path, "a.csv", text) == [
        {"prompt": "1, 2\nor 3?", "answer": "7", "score": 0.5, "id": "007", "ok": True},
        {"prompt": "5", "answer": 'say "x"', "score": 1.0, "id": "010", "ok": False},
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "prompt\tlabel\nx, y\t1\n\nz\t\n"),
        ("a.csv", '\ufeffprompt,label\r\n"x, y",1\r\nz,\r\n'),
        ("a.csv", "prompt;label\nx, y;1\nz;\n"),
    ],
)
def test_separators_marks_and_line_ends_of_other_programs(tmp_path, name, text):
    expected = [{"prompt": "x, y", "label": 1}, {"prompt": "z", "label": None}]
    assert rows_of(tmp_path, name, text) == expected


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('"Hm\t1\nSo"\t2\n"No" he said\t3\n', [('"Hm', 1), ('So"', 2), ('"No" he said', 3)]),
        ('"say ""x"""\t1\n"y"\t2\n""\t3\n', [('say "x"', 1), ("y", 2), ("", 3)]),
        ('"two\nlines"\t1\n"a\tb"\t2\n', [("two\nlines", 1), ("a\tb", 2)]),
        ('"a\t1\nb"\t2\n"say ""x"""\t3\n', [("a\t1\nb", 2), ('say "x"', 3)]),
    ],
)
def test_a_quotation_mark_that_begins_a_value_between_tabs_joins_no_rows(tmp_path, text, rows):
    """The first two values were one of two rows. pandas and Excel enclose values."""
    found = rows_of(tmp_path, "a.tsv", f"text\tlabel\n{text}")
    assert [(row["text"], row["label"]) for row in found] == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2,3\n", "as many values in each row.* line 2 has 3"),
        ("a,b\n1\n", "line 2 has 1"),
        ('a,b\n"x"y,2\n', "separated by ',': line 2 is not"),
        ("a,a\n1,2\n", "different column names"),
        (",b\n1,2\n", "column names"),
        ("3+4=,7\n2+2=,4\n", r"it begins with \['3\+4=', '7'\]\. Add the line, such as prompt,ans"),
        ("a,b\n", "at least one row"),
        ("'a';'b'\n'1';'2'\n", "without single quotes"),
    ],
)
def test_what_is_wrong_with_a_table_is_told(tmp_path, text, told):
    with pytest.raises(Problems, match=told):
        rows_of(tmp_path, "a.csv", text)


def test_columns_that_pandas_numbers_have_their_numbers_as_names(tmp_path):
    assert rows_of(tmp_path, "a.csv", "0,1\n3+4=,7\n") == [{"0": "3+4=", "1": 7}]


def test_tables_are_prompts_pairs_and_texts(tmp_path):
    tokenizer = byte_tokenizer()
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\nx,1,2\n")
    batch = PromptedPairSource(str(tmp_path / "pairs.csv"), tokenizer=tokenizer, max_length=9)
    assert tokenizer.decode(batch.batch(0, 1)[columns.CHOSEN_IDS][0]).startswith("1")
    (tmp_path / "texts.tsv").write_text("text\n12\n")
    texts = TextSource(str(tmp_path / "texts.tsv"), tokenizer=tokenizer, max_length=9)
    assert tokenizer.decode(texts.batch(0, 1)[columns.INPUT_IDS][0]) == "<s>12</s>"


# --- encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "content"), [("a.txt", "ä"), ("a.jsonl", '{"text": "ä"}')])
def test_a_byte_order_mark_is_no_text(tmp_path, name, content):
    assert rows_of(tmp_path, name, content.encode("utf-8-sig")) == [{"text": "ä"}]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize(("encoding", "likely"), [("latin-1", "Latin-1"), ("utf-16", "UTF-16")])
def test_another_encoding_is_named_with_its_line(tmp_path, name, encoding, likely):
    content = {"a.jsonl": '{"text": "a"}\n{"text": "ä"}'}.get(name, "text\nä")
    with pytest.raises(Problems, match=rf"UTF-8: line \d holds .*{likely}.*iconv -f"):
        rows_of(tmp_path, name, content.encode(encoding))


# --- tool calls in Parquet -----------------------------------------------------------------------


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
    ]}  # fmt: skip


def chats():
    ask, result = {"role": "user", "content": "x"}, {"role": "tool", "content": "3"}
    say = {"role": "assistant", "content": "y"}
    return [
        {"messages": [ask, call("add", text="1"), result, say], "tools": [ADD]},
        {"messages": [ask, call("find", key="k", limit=2), result, say], "tools": [ADD]},
    ]


@pytest.mark.parametrize("how", ["parquet", "data set"])
def test_nulls_that_parquet_puts_into_calls_are_not_learnt(tmp_path, how):
    if how == "parquet":
        source = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_pylist(chats()), source)
    else:
        source = str(tmp_path / "folder")
        pytest.importorskip("datasets").Dataset.from_list(chats()).save_to_disk(source)
    for read in (
        list(load_rows(source)),
        [{"messages": m} for m in load_rows(source).column("messages")],
    ):
        for row, expected in zip(read, chats(), strict=True):
            assert row["messages"] == expected["messages"]
    tokenizer = family_tokenizer("chatml")
    stored, held = (
        TextSource(data, tokenizer=tokenizer, max_length=900, shuffle=False).batch(0, 2)
        for data in (source, chats())
    )
    assert torch.equal(stored[columns.INPUT_IDS], held[columns.INPUT_IDS])


def test_nulls_of_other_columns_stay(tmp_path):
    rows = [{"text": "x", "info": {"a": 1}}, {"text": "y", "info": {"b": 2}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet"))[0]["info"] == {"a": 1, "b": None}


def test_arguments_as_json_text_are_rendered_as_objects():
    tokenizer, chat = family_tokenizer("chatml"), chats()[0]["messages"]
    texts = chats()[0]["messages"]
    texts[1]["tool_calls"][0]["function"]["arguments"] = '{"text": "1"}'
    assert encode_chat(tokenizer, texts) == encode_chat(tokenizer, chat)


def test_marked_templates_announce_tools():
    """The template of TRL's kind marks with {% generation %} what the assistant says."""
    tokenizer = family_tokenizer("chatml")
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    plain, tokenizer.chat_template = tokenizer.chat_template, marked
    try:
        ids, _ = encode_chat(tokenizer, chats()[0]["messages"], tools=[ADD])
    finally:
        tokenizer.chat_template = plain
    assert '"name": "add"' in tokenizer.decode(ids) and "Adds the numbers" in tokenizer.decode(ids)


# --- rollouts of conversations -------------------------------------------------------------------


def rollout(sample, score, completion, loss_mask, **changes):
    """A row of the store: [1, 5] is the prompt; what the mask leaves out a tool said."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "shown"}] * 2
    return {
        "run": "r", "iteration": 1, "position": 0, "group": 0, "sample": sample, "score": score,
        "prompt": "[user] q", "completion": f"[assistant] {sample}", "prompt_ids": [1, 5],
        "completion_ids": completion, "loss_mask": loss_mask, "messages": messages,
        "tokenizer": vocabulary_hash(family_tokenizer("qwen3")), **changes,
    }  # fmt: skip


ROLLOUTS = [
    rollout(0, 1.0, [10, 11, 12, 13], [True, False, False, True]),
    rollout(1, 0.0, [10, 14], [True, True]),
]


def test_sft_learns_each_row_of_a_rollout_as_it_was_sampled():
    source = TextSource(ROLLOUTS, tokenizer=family_tokenizer("qwen3"), max_length=50, shuffle=False)
    assert len(source) == 2
    batch = source.batch(0, 2)
    assert batch[columns.INPUT_IDS].tolist()[0] == [1, 5, 10, 11, 12, 13]
    assert batch[columns.LOSS_MASK].int().tolist()[0] == [0, 0, 1, 0, 0, 1]
    assert int(batch[columns.LOSS_MASK].sum()) == 4


def test_pairs_are_the_tokens_that_were_sampled():
    tokenizer = family_tokenizer("qwen3")
    batch = PromptedPairSource(ROLLOUTS, tokenizer=tokenizer, max_length=50).batch(0, 1)
    assert batch[columns.PROMPT_IDS].tolist() == [[1, 5]]
    assert batch[columns.CHOSEN_IDS].tolist() == [[10, 11, 12, 13]]
    assert batch[columns.CHOSEN_LOSS_MASK].int().tolist() == [[1, 0, 0, 1]]
    assert batch[columns.REJECTED_IDS].tolist() == [[10, 14]]
    assert batch[columns.REJECTED_LOSS_MASK].int().tolist() == [[1, 1]]
    whole = PairSource(ROLLOUTS, tokenizer=tokenizer, max_length=50).batch(0, 1)
    assert whole[columns.CHOSEN_IDS].tolist() == [[1, 5, 10, 11, 12, 13]]


def test_a_rollout_of_several_rows_is_no_half_of_a_pair():
    again = rollout(0, 1.0, [15], [True], prompt_ids=[1, 5, 10, 11])
    with pytest.raises(Problems, match="rollouts of one row each"):
        PromptedPairSource([*ROLLOUTS, again], tokenizer=family_tokenizer("qwen3"), max_length=50)


@pytest.mark.parametrize("kind", [TextSource, PromptedPairSource])
def test_another_tokenizer_cannot_learn_from_conversations(kind):
    with warnings.catch_warnings(), pytest.raises(Problems, match="tokenizer that sampled"):
        kind(ROLLOUTS, tokenizer=family_tokenizer("llama3"), max_length=50).batch(0, 1)


# --- conversations as ShareGPT wrote them ---------------------------------------------------------

SHAREGPT = [
    {"conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
    ]},
    {"conversations": [
        {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"},
        {"from": "human", "value": "And 2+2?"}, {"from": "gpt", "value": "4", "weight": 1},
    ]},
]  # fmt: skip


@pytest.mark.parametrize("how", ["list", "jsonl", "parquet", "folder"])
def test_conversations_of_sharegpt_are_learnt_from_and_asked(tmp_path, how):
    """The chat with roles and content, whatever holds it; as a prompt without its last answer."""
    source: object = SHAREGPT
    if how == "jsonl":
        source = str(tmp_path / "a.jsonl")
        with open(source, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in SHAREGPT)
    elif how == "parquet":
        source = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_pylist(SHAREGPT), source)
    elif how == "folder":
        source = str(tmp_path / "a")
        datasets.Dataset.from_list(SHAREGPT).save_to_disk(source)
    tokenizer = family_tokenizer("chatml")
    texts = TextSource(source, tokenizer=tokenizer, max_length=200, shuffle=False)
    batch = texts.batch(0, 2)
    learnt = [
        tokenizer.decode(ids[mask])
        for ids, mask in zip(batch[columns.INPUT_IDS], batch[columns.LOSS_MASK], strict=True)
    ]
    assert learnt == ["2<|im_end|>", "2<|im_end|>4<|im_end|>"]
    prompts = PromptSource(source, shuffle=False).rows(0, 2)
    assert [message["role"] for message in prompts[0].prompt] == ["system", "user"]
    assert [message["content"] for message in prompts[1].prompt] == ["1+1?", "2", "And 2+2?"]


def test_a_column_of_that_name_that_holds_no_chats_stays():
    rows = [{"conversations": 3, "text": "a"}]
    assert list(load_rows(rows)) == rows


def test_nulls_of_rows_that_are_not_in_arrow_stay(tmp_path):
    """Of tool calls they are arguments; a reward's own columns are no chats."""
    call = {"function": {"name": "weather", "arguments": {"city": "x", "unit": None}}}
    row = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": "And there?"},
        ],
        "edges": [{"from": "A", "value": None, "to": "B"}, {"from": "alice", "value": 5}],
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert list(load_rows(str(path))) == [row]
    (prompt,) = PromptSource(str(path), shuffle=False).rows(0, 1)
    assert prompt.prompt == row["messages"] and prompt.columns["edges"] == row["edges"]


def test_the_prompts_of_sharegpt_have_their_own_column_s_name():
    (prompt,) = PromptSource(SHAREGPT[:1], prompt_column="conversations").rows(0, 1)
    assert [message["content"] for message in prompt.prompt] == ["Be brief.", "1+1?"]
    beside = [{"prompt": "1+1?", **SHAREGPT[0]}]
    (prompt,) = PromptSource(beside).rows(0, 1)
    assert prompt.prompt == "1+1?" and prompt.columns["conversations"][2]["content"] == "2"


@pytest.mark.parametrize(
    ("name", "text"),
    [("A.CSV", "prompt\nx\n"), ("A.JSONL", '{"prompt": "x"}\n'), ("A.Tsv", "prompt\tb\nx\t\n")],
)
def test_the_ending_of_a_file_may_be_in_capitals(tmp_path, name, text):
    assert rows_of(tmp_path, name, text)[0]["prompt"] == "x"


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    """pyarrow raises OSError where the bytes of a page or of the metadata are wrong."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"row {i}" for i in range(10_000)]}), path)
    content = path.read_bytes()
    half = len(content) // 2
    page = content[:half] + bytes(64) + content[half + 64 :]
    for damaged in (page, content[:-200] + content[-99:]):
        path.write_bytes(damaged)
        with pytest.raises(Problems, match=r"rows.parquet' must be a Parquet file that can"):
            load_rows(str(path))


@pytest.mark.parametrize("kind", ["parquet", "frame", "data set"])
def test_the_index_that_pandas_stores_is_no_column(tmp_path, kind):
    frame = pd.DataFrame({"text": ["a", "b", "c", "d"]}).iloc[[3, 0, 1]]  # no range
    if kind == "frame":
        source = frame
    elif kind == "parquet":
        source = str(tmp_path / "a.parquet")
        frame.to_parquet(source)
    else:
        source = datasets.Dataset.from_pandas(frame)
    rows = load_rows(source)
    assert rows.columns == ["text"] and {*rows[0]} == {"text"}
    assert PromptSource(source).prompt_column == "text"


def test_bare_tool_schemas_of_parquet_hold_no_nulls(tmp_path):
    def schema(name, argument):
        return {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}}

    tools = [[schema("weather", "city")], [schema("time", "zone")]]
    rows = [{"prompt": [{"role": "user", "content": "?"}], "tools": each} for each in tools]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = load_rows(str(tmp_path / "a.parquet"))
    assert [row["tools"] for row in found] == tools == found.column("tools")
