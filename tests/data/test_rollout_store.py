"""Rows that are put are on disk once, whoever stops, restores or runs out of room."""

from __future__ import annotations

import errno
import json
import logging
import threading

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllib_llm.data.rollout_store import (
    QUEUE_SIZE,
    SCHEMA,
    RolloutSchemaError,
    RolloutStore,
    RolloutStoreError,
    conform,
)
from rllib_llm.data.rollouts import open_rollouts, rollout_folders
from rllib_llm.data.rows import DataSourceError
from rllib_llm.data.sources import load_rows
from tests.data.tiny_rollouts import group, put, table


def rows_in(folder) -> list[tuple[int, int]]:
    """(iteration, position) of every row, in order."""
    found = open_rollouts(rollout_folders(folder)).to_table(columns=["iteration", "position"])
    return sorted((row["iteration"], row["position"]) for row in found.to_pylist())


def test_pandas_pyarrow_duckdb_and_datasets_read_the_same_rows(tmp_path):
    store = RolloutStore(tmp_path)
    for iteration in (1, 2):
        put(store, iteration, *group(iteration, [0.0, 1.0]))
    store.stop()
    assert rows_in(tmp_path) == [(1, 1), (1, 1), (2, 2), (2, 2)]
    read = pd.read_parquet(tmp_path)
    assert read.groupby("iteration", observed=True)["score"].mean().tolist() == [0.5, 0.5]
    assert pq.read_table(tmp_path).num_rows == 4
    datasets = pytest.importorskip("datasets")
    for source in ({"path": "parquet", "data_dir": str(tmp_path)}, {"path": str(tmp_path)}):
        rows = datasets.load_dataset(**source, split="train", cache_dir=str(tmp_path / ".cache"))
        assert rows["iteration"] == [1, 1, 2, 2] and rows["score"] == [0.0, 1.0, 0.0, 1.0]
        assert json.loads(rows[1]["rewards"]) == {"correct": 1.0}
    duckdb = pytest.importorskip("duckdb")
    text = (
        "SELECT iteration, sum((rewards->>'correct')::FLOAT) "
        f"FROM '{tmp_path}/*.parquet' GROUP BY ALL"
    )
    with duckdb.connect() as connection:
        assert sorted(connection.execute(text).fetchall()) == [(1, 1.0), (2, 1.0)]


def test_the_schema_is_in_every_file_and_another_version_is_refused(tmp_path):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(0, [1.0]))
    store.stop()
    (file,) = tmp_path.glob("part-00000000.parquet")
    found = pq.read_schema(file)
    assert found.names == SCHEMA.names and found.metadata[b"rllib_llm_rollouts"] == b"2"
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"
    later = pq.read_table(file).replace_schema_metadata({b"rllib_llm_rollouts": b"9"})
    pq.write_table(later, file)
    with pytest.raises(RolloutSchemaError, match="schema version 9, which must be 2"):
        open_rollouts(rollout_folders(tmp_path))


def test_a_folder_of_the_first_version_is_refused_by_all_who_read_or_write(tmp_path):
    folder = tmp_path / "trial" / "rollouts"
    (folder / "iteration=1").mkdir(parents=True)
    (folder / "_store.json").write_text('{"store": "a", "others": {}}')
    old = pa.table({"prompt": ["1+1="]}).replace_schema_metadata({b"rllib_llm_rollouts": b"1"})
    pq.write_table(old, folder / "iteration=1" / "part-00000000.parquet")
    said = "schema version 1, which must be 2.*Sample the rollouts again, or read them with"
    for read in (lambda: rollout_folders(tmp_path), lambda: open_rollouts([folder])):
        with pytest.raises(RolloutSchemaError, match=said):
            read()
    with pytest.raises(DataSourceError, match=said):
        load_rows(str(folder))
    store = RolloutStore(folder, on_error="stop")
    put(store, 1, *group(0, [1.0]))
    with pytest.raises(RolloutStoreError, match="schema version 1, which must be 2"):
        store.flush()
    store.stop()


def test_rows_of_an_iteration_become_one_file(tmp_path):
    store = RolloutStore(tmp_path)
    for position in range(5):
        put(store, 7, *group(position, [1.0]))
    store.flush()
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    put(store, 7, *group(5, [1.0]))  # after a checkpoint the same iteration gets a second file
    store.stop()
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert store.metrics()["rows"] == 6


def test_put_waits_while_the_queue_is_full(tmp_path):
    """The writer is held in its first table: so many more wait in the queue, and the next waits."""
    store, goes_on, began = RolloutStore(tmp_path), threading.Event(), threading.Event()

    def held():
        began.set()
        goes_on.wait()
        return table(*group(0, [1.0]))

    store.put(1, 1, held)
    began.wait()
    for position in range(QUEUE_SIZE):
        put(store, 1, *group(position, [1.0]))
    one_more = threading.Thread(target=put, args=(store, 1, *group(99, [1.0])))
    one_more.start()
    one_more.join(0.2)
    assert one_more.is_alive()
    goes_on.set()
    one_more.join()
    store.stop()
    assert len(rows_in(tmp_path)) == QUEUE_SIZE + 2
    assert store.metrics()["wait_seconds"] > 0.1


def test_a_restored_run_has_no_row_twice_and_none_lost(tmp_path):
    """Killed in iteration 4 after a checkpoint of iteration 2: 3 and 4 are sampled again."""
    killed = RolloutStore(tmp_path)
    put(killed, 1, *group(1, [1.0]))
    put(killed, 2, *group(2, [1.0]))
    state = killed.state()
    put(killed, 3, *group(3, [1.0]))
    put(killed, 4, *group(4, [1.0]))
    killed.flush()
    restored = RolloutStore(tmp_path)
    restored.set_state(state)
    assert restored.state() == state
    put(restored, 3, *group(3, [1.0]))
    restored.stop()
    assert rows_in(tmp_path) == [(1, 1), (2, 2), (3, 3)]
    again = RolloutStore(tmp_path)  # a run that starts anew in the folder
    put(again, 1, *group(1, [1.0]))
    again.stop()
    assert rows_in(tmp_path) == [(1, 1)]


def test_a_live_run_can_go_back(tmp_path):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [1.0]))
    state = store.state()
    put(store, 2, *group(2, [1.0]))
    store.set_state(state)
    put(store, 2, *group(5, [1.0]))
    store.stop()
    assert rows_in(tmp_path) == [(1, 1), (2, 5)]


def test_a_run_that_goes_on_from_anothers_checkpoint_keeps_its_own_past(tmp_path):
    """As population-based training does; where it fails and goes on from there once more, what it
    sampled since then is replaced."""
    other = RolloutStore(tmp_path / "other")
    put(other, 1, *group(1, [1.0]))
    state = other.state()
    other.stop()
    own = RolloutStore(tmp_path / "own")
    put(own, 1, *group(10, [1.0]))
    for _ in range(2):
        own.set_state(state)
        put(own, 2, *group(11, [1.0]))
        own.flush()
    own.stop()
    assert rows_in(tmp_path / "own") == [(1, 10), (2, 11)]
    assert rows_in(tmp_path / "other") == [(1, 1)]


class FullDisk:
    """A table of which writing fails as on a full disk."""

    def __call__(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, caplog):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [1.0]))
    store.flush()
    with caplog.at_level(logging.WARNING):
        for iteration in (2, 3):
            store.put(iteration, 4, FullDisk())
        store.flush()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the disk is full. Free some, or set store_rollouts=False. The run goes on" in message
    store.stop()
    assert rows_in(tmp_path) == [(1, 1)]
    assert store.metrics()["lost"] == 8


def test_a_full_disk_stops_the_run_where_it_is_told_to(tmp_path):
    store = RolloutStore(tmp_path, on_error="stop")
    store.put(1, 4, FullDisk())
    with pytest.raises(RolloutStoreError, match="the disk is full. Free some"):
        store.flush()
    with pytest.raises(RolloutStoreError, match="the disk is full"):
        put(store, 2, *group(2, [1.0]))
    store.stop()


def test_nothing_half_written_is_read(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [1.0]))
    store.flush()
    (tmp_path / ".part-00000001.parquet.partial").write_bytes(b"PAR1")
    assert rows_in(tmp_path) == [(1, 1)]
    store.stop()


def test_absent_columns_are_null():
    made = conform(pa.table({"score": pa.array([1.0, 2.0])}), 3)
    assert made.schema == SCHEMA and made.column("iteration").to_pylist() == [3, 3]
    assert made.column("prompt_ids").null_count == 2
