from __future__ import annotations

import json
from pathlib import Path

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllib_llm.data.rows import MadeRows, Rows, require_columns
from rllib_llm.data.sources import check_source, load_rows
from rllib_llm.shared.errors import Problems

ROWS = [{"prompt": "one", "label": 1}, {"prompt": "two", "label": 0}, {"prompt": "☃", "label": 1}]


def rows_of_a_function(count=2):
    return [{"prompt": f"number {i}"} for i in range(count)]


def _write_json_lines(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_lines_and_json_array_read_alike(tmp_path):
    lines = _write_json_lines(tmp_path / "rows.jsonl")
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(ROWS), encoding="utf-8")
    for path in (lines, str(lines), array):
        rows = load_rows(path)
        assert list(rows) == ROWS
        assert rows.columns == ["prompt", "label"]
        assert rows.column("label") == [1, 0, 1]
        assert rows[-1] == ROWS[-1] and rows[1:] == ROWS[1:]


def test_parquet_stays_in_arrow_and_reads_row_by_row(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    rows = load_rows(tmp_path / "rows.parquet")
    assert len(rows) == 3
    assert [rows[0], rows[-1]] == [ROWS[0], ROWS[2]]
    assert rows.column("prompt") == ["one", "two", "☃"]


def test_text_gives_a_row_for_each_line_that_is_not_blank(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("first\n\n  \nsecond \u2028 half\n", encoding="utf-8")
    # U+2028 is a line separator to str.splitlines, but the file has it inside a line.
    assert list(load_rows(path)) == [{"text": "first"}, {"text": "second \u2028 half"}]


def test_hugging_face_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    assert list(load_rows(saved)) == ROWS
    parts = tmp_path / "parts"
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    ).save_to_disk(parts)
    assert len(load_rows(parts)) == 3  # "train" by default
    assert list(load_rows({"path": parts, "split": "test"})) == ROWS[:1]
    with pytest.raises(Problems, match=r"split='dev' must be .* it has \['train', 'test'\]"):
        load_rows({"path": str(parts), "split": "dev"})
    assert list(load_rows(datasets.Dataset.from_list(ROWS))) == ROWS


def test_a_folder_that_holds_a_model_is_told_before_it_is_read(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for ask in (check_source, load_rows):
        with pytest.raises(Problems, match="be a folder of data: it holds a model or a tok"):
            ask(str(tmp_path))


def test_a_folder_whose_files_do_not_belong_together_is_told(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1}]')
    (tmp_path / "b.json").write_text('[{"b": {"c": "text"}}]')
    with pytest.raises(Problems, match="the folder is there, and reading it as a data set"):
        load_rows(str(tmp_path))


def test_functions_lists_and_strings():
    path = f"{__name__}:rows_of_a_function"
    assert list(load_rows(path)) == rows_of_a_function()
    assert len(load_rows({"path": path, "kwargs": {"count": 5}})) == 5
    assert list(load_rows(rows_of_a_function)) == rows_of_a_function()
    assert list(load_rows(word for word in ("a", "b"))) == [{"text": "a"}, {"text": "b"}]
    rows = load_rows(ROWS)
    assert load_rows(rows) is rows


def test_data_frames_and_streams_are_read_by_rows():
    """The rows of a data frame were the names of its columns."""
    frame = pandas.DataFrame({"prompt": ["a", "b", "c"], "label": [1, 2, 3]})
    rows = load_rows(frame[frame.label > 1])
    assert list(rows) == [{"prompt": "b", "label": 2}, {"prompt": "c", "label": 3}]
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert list(load_rows(stream)) == ROWS


def test_patterns_and_lists_of_files_follow_each_other(tmp_path):
    first = _write_json_lines(tmp_path / "a.jsonl", ROWS[:1])
    second = _write_json_lines(tmp_path / "b.jsonl", ROWS[1:])
    assert list(load_rows([first, second])) == ROWS
    assert list(load_rows(str(tmp_path / "*.jsonl"))) == ROWS


def test_columns_are_renamed_and_rows_limited(tmp_path):
    path = _write_json_lines(tmp_path / "rows.jsonl")
    rows = load_rows({"path": path, "columns": {"question": "prompt"}, "limit": 2})
    assert list(rows) == [{"question": "one", "label": 1}, {"question": "two", "label": 0}]


def test_a_row_without_a_column_has_none_there():
    rows = load_rows([{"prompt": "a"}, {"prompt": "b", "extra": 1}])
    assert rows[0] == {"prompt": "a", "extra": None}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "prompts must hold at least one row: a list of rows is empty"),
        (None, "must be a file .* NoneType is none of these"),
        (7, "int is none of these"),
        ([{"prompt": "a"}, 3], "row 1 is int '3'"),
        ({"pth": "x"}, "pth must be a known key. Did you mean 'path'"),
        ({"split": "train"}, "must have a 'path'"),
        ({"path": ["a"], "limit": -1}, r"prompts.limit=-1 must be an integer of at least 1"),
        ({"path": ["a"], "limit": True}, r"prompts.limit=True must be an integer"),
        ("/", r"the folder is there, and reading it as a data set failed"),
        ({"path": ["a"], "columns": "text"}, r"prompts.columns='text' must be \{new name"),
        ({"path": ["a"], "columns": {"a": "text", "b": "text"}}, "one new name"),
        ({"path": ["a"], "where": "score > 0"}, "a list holds no rollouts of a run"),
        ({"path": ["a"], "where": True}, r"prompts.where=True must be an SQL"),
        (
            {"path": ["a"], "best_of_group": "2"},
            r"prompts.best_of_group='2' must be an integer",
        ),
        ({"path": ["a"], "split": "test"}, r".split='test' must be left out: a list has no"),
        ({"path": ["a"], "kwargs": {"n": 1}}, "a list is no function with arguments"),
        ({"path": rows_of_a_function, "revision": "main"}, "a function has no .* revisions"),
        ({"path": f"{__name__}:ROWS", "kwargs": {"n": 1}}, "be arguments of .*, which has none"),
        ({"path": f"{__name__}:rows_of_a_function", "kwargs": 3}, "kwargs=3 must be arguments of"),
        ("./nothing.jsonl", "must be a file or folder that exists"),
        ("/nothing/here/rows.parquet", "'/nothing/here' does not exist either"),
    ],
)
def test_wrong_sources_say_what_arrived_and_what_to_do(source, message):
    with pytest.raises(Problems, match=message):
        load_rows(source, name="prompts")


def test_a_misspelt_file_is_named(tmp_path):
    _write_json_lines(tmp_path / "train.jsonl")
    with pytest.raises(Problems, match=r"Did you mean '.*train\.jsonl'"):
        load_rows(tmp_path / "trian.jsonl")


def test_broken_files_are_refused_with_their_line(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": oops}\n')
    with pytest.raises(Problems, match=r"line 2 is '\{\"prompt\": oops\}'"):
        load_rows(broken)
    for number, text in enumerate(("9" * 5000, "[" * 100_000)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f'{{"prompt": {text}}}\n')
        with pytest.raises(Problems, match="line 1 is"):
            load_rows(path)
    not_parquet = tmp_path / "rows.parquet"
    not_parquet.write_text("text")
    with pytest.raises(Problems, match="must be a Parquet file"):
        load_rows(not_parquet)
    unknown = tmp_path / "rows.docx"
    unknown.write_text("text")
    with pytest.raises(Problems, match=".docx' must end in one of"):
        load_rows(unknown)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(Problems, match="at least one row"):
        load_rows(empty)


def test_columns_have_texts_as_names():
    """Reward functions failed on all rows: "keywords must be strings"."""
    with pytest.raises(Problems, match=r"texts as keys: row 1 is dict .*3: 1"):
        load_rows([{"prompt": "x"}, {"prompt": "x", 3: 1}])


def test_a_function_that_is_not_there_or_gives_no_rows():
    with pytest.raises(Problems, match="Did you mean 'rows_of_a_function'"):
        load_rows(f"{__name__}:rows_of_a_functoin", name="prompts")
    with pytest.raises(Problems, match="it gave int"):
        load_rows(lambda: 3)


def test_wrong_arguments_of_a_function_are_refused():
    source = {"path": f"{__name__}:rows_of_a_function", "kwargs": {"wrong": 1}}
    with pytest.raises(Problems, match=r"kwargs=\{'wrong': 1\} must be arguments of"):
        load_rows(source, name="prompts")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"pth": "x"}, "pth must be a known key. Did you mean 'path'"),
        ("/nothing/here/rows.parquet", "'/nothing/here' does not exist either"),
        (["one.jsonl", "two.jsonl"], "'one.jsonl' must be a file or folder that exists"),
        (f"{__name__}:rows_of_a_functoin", "Did you mean 'rows_of_a_function'"),
        ({"path": f"{__name__}:rows_of_a_function", "kwargs": {"wrong": 1}}, "must be arguments"),
    ],
)
def test_what_cannot_be_read_is_told_without_reading(source, message):
    with pytest.raises(ValueError, match=message):
        check_source(source, name="prompts")


def test_what_may_be_readable_passes_the_check(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{oops")  # reading would fail
    for source in (broken, [broken], "org/on-the-hub", [{"prompt": "a"}], None,
                   f"{__name__}:rows_of_a_function"):  # fmt: skip
        check_source(source)


def test_missing_columns_name_those_there_are():
    rows = Rows([{"text": "a", "label": 1}], "reviews.jsonl")
    with pytest.raises(
        Problems, match=r"reviews.jsonl: it has \['text', 'label'\].*'label'"
    ):
        require_columns(rows, ["labels"])
    with pytest.raises(Problems, match="column='prompt'"):
        rows.column("prompt")


def test_an_unreachable_hub_id_is_explained(monkeypatch):
    pytest.importorskip("datasets")
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(Problems, match="'nobody/nothing' must be .*no network") as raised:
        load_rows("nobody/nothing", name="prompts")
    assert f"(looked in {str(Path.cwd())!r})" in str(raised.value)


def test_a_row_that_raises_an_index_error_is_not_the_end_of_the_rows():
    class Broken(MadeRows):
        def make(self, index):
            return [{"a": 0}, {"a": 1}][index]

    with pytest.raises(IndexError, match="list index out of range"):
        list(Broken(5))  # as a for loop over a sequence it would end after two
    assert list(Broken(2)) == Broken(2)[:] == [{"a": 0}, {"a": 1}]


def test_a_split_of_a_file_is_refused(tmp_path):
    """All rows were read, the held-out ones for training as well."""
    path = _write_json_lines(tmp_path / "rows.jsonl")
    for read in (load_rows, check_source):
        with pytest.raises(Problems, match="split='test' must be left out.*has no"):
            read({"path": path, "split": "test"})
    assert len(load_rows({"path": path, "split": None})) == len(ROWS)


def _broken():
    yield {"prompt": "a"}
    raise KeyError("row")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (_broken(), "KeyError: 'row', raised in test_sources.py:"),
        (map((1).__truediv__, [0]), "ZeroDivisionError: division by zero"),
        (pandas.DataFrame({"prompt": ["a", "b"], "x": [1, "s"]}), "ArrowInvalid: .*column x with"),
        (pandas.Series(["a", "b"]), "ArrowInvalid: .*non-struct type"),
    ],
    ids=["a generator", "an iterator", "a column of two kinds", "a series"],
)
def test_rows_whose_code_raises_are_told_with_their_setting(source, reason):
    """These were raw tracebacks; a function's were told."""
    with pytest.raises(Problems, match=f"^prompts=<.*> must give rows: {reason}"):
        load_rows(source, name="prompts")
