"""Parquet files too large for memory: mapped from disk, and handed out as smaller ones are."""

from __future__ import annotations

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllib_llm.data import files
from rllib_llm.data.sources import load_rows
from rllib_llm.envs.prompts import PromptSource

ROWS = [{"question": f"q{i}", "prompt": f"other {i}", "messages": None} for i in range(10)]


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGE_BYTES", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for number, rows in enumerate((ROWS[:6], ROWS[6:])):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
    return tmp_path


def test_mapped_files_are_never_lists_of_rows(large):
    source = {"path": str(large / "*.parquet"), "columns": {"prompt": "question"}, "limit": 8}
    rows = load_rows(source)
    assert isinstance(rows._backing, datasets.Dataset)
    assert rows._backing.cache_files  # on disk
    assert rows.columns == ["prompt", "messages"]
    assert [row["prompt"] for row in rows] == [f"q{i}" for i in range(8)]


def test_a_mapped_file_has_few_batches_whose_heads_are_read_at_every_start(large):
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(70_000)]}), large / "many.parquet")
    (cached,) = load_rows(str(large / "many.parquet"))._backing.cache_files
    with pa.memory_map(cached["filename"]) as stream:
        assert len(list(pa.ipc.open_stream(stream))) <= 2


def test_they_give_the_prompts_that_small_files_give(large, monkeypatch):
    mapped = PromptSource(str(large / "*.parquet"), seed=4)
    monkeypatch.setattr(files, "_LARGE_BYTES", 10**9)
    in_memory = PromptSource(str(large / "*.parquet"), seed=4)
    assert mapped.rows(3, 20) == in_memory.rows(3, 20)


@pytest.mark.parametrize("large_bytes", [0, 10**9])
def test_columns_of_two_kinds_are_read_all_the_same(large, monkeypatch, large_bytes):
    monkeypatch.setattr(files, "_LARGE_BYTES", large_bytes)
    for number, answer in enumerate((7, "seven")):
        table = pa.table({"prompt": ["p"], "answer": [answer]})
        pq.write_table(table, large / f"k{number}.parquet")
    rows = load_rows(str(large / "k*.parquet"))
    assert [row["answer"] for row in rows] == [7, "seven"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_is_trained_on_or_held_out(shuffle):
    halves = [
        PromptSource([f"p{i}" for i in range(50)], split=split, eval_fraction=0.3, shuffle=shuffle)
        for split in ("train", "eval")
    ]
    assert [len(half) for half in halves] == [35, 15]
    chosen = [sorted(half.indices(0, len(half)).tolist()) for half in halves]
    assert sorted(chosen[0] + chosen[1]) == list(range(50))
    for half, indices in zip(halves, chosen, strict=True):
        assert [row.index for row in half.all_rows()] == indices  # in the order of the data set
        if not shuffle:
            assert half.indices(0, len(half)).tolist() == indices
