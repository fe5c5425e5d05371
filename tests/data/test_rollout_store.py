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

from rllib_llm.data import rollout_store
from rllib_llm.data.rollout_store import (
    QUEUE_SIZE,
    SCHEMA,
    RolloutSchemaError,
    RolloutStore,
    conform,
    not_contained,
)
from rllib_llm.data.rollouts import open_rollouts, rollout_folders
from rllib_llm.shared.errors import Problems
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
    assert found.names == SCHEMA.names and found.metadata[b"rllib_llm_rollouts"] == b"4"
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"
    later = pq.read_table(file).replace_schema_metadata({b"rllib_llm_rollouts": b"9"})
    pq.write_table(later, file)
    with pytest.raises(RolloutSchemaError, match="schema version='9' must be 4"):
        open_rollouts(rollout_folders(tmp_path))


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
    assert "the disk is full. Free some space, or set store_rollouts=False. The run" in message
    store.stop()
    assert rows_in(tmp_path) == [(1, 1)]
    assert store.metrics()["lost"] == 8


def test_a_full_disk_stops_the_run_where_it_is_told_to(tmp_path):
    store = RolloutStore(tmp_path, on_error="stop")
    store.put(1, 4, FullDisk())
    with pytest.raises(Problems, match="the disk is full. Free some"):
        store.flush()
    with pytest.raises(Problems, match="the disk is full"):
        put(store, 2, *group(2, [1.0]))
    store.stop()


def test_nothing_half_written_is_read(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [1.0]))
    store.flush()
    (tmp_path / ".part-00000001.parquet.partial").write_bytes(b"PAR1")
    assert rows_in(tmp_path) == [(1, 1)]
    store.stop()


def test_the_size_of_waiting_rows_is_not_counted_anew_with_each_group(tmp_path, monkeypatch):
    """Rejected groups are put one by one, thousands in an iteration of a large fleet."""
    asked = []

    class Rows:
        @property
        def nbytes(self) -> int:
            asked.append(self)
            return 1

    monkeypatch.setattr(rollout_store, "conform", lambda rows, iteration: rows)
    store = RolloutStore(tmp_path)
    for _ in range(50):
        store._add(Rows)
    assert len(asked) == 50


def test_absent_columns_are_null():
    made = conform(pa.table({"score": pa.array([1.0, 2.0])}), 3)
    assert made.schema == SCHEMA and made.column("iteration").to_pylist() == [3, 3]
    assert made.column("prompt_ids").null_count == 2


# --- many files -----------------------------------------------------------------------------------


def write_iterations(store, iterations):
    for iteration in iterations:
        put(store, iteration, *group(iteration, [1.0]))
        store.flush()


def names_in(folder) -> list[str]:
    return sorted(file.name for file in folder.glob("*.parquet"))


@pytest.mark.slow
def test_files_are_merged_by_32_and_those_again_and_no_row_is_lost(tmp_path):
    store = RolloutStore(tmp_path)
    write_iterations(store, range(1, 1027))
    store.stop()
    assert names_in(tmp_path) == ["part-00000000-00001023.parquet", "part-00001024.parquet",
                                  "part-00001025.parquet"]  # fmt: skip
    assert rows_in(tmp_path) == [(i, i) for i in range(1, 1027)]
    read = pd.read_parquet(tmp_path)
    assert sorted(read["iteration"]) == list(range(1, 1027))


@pytest.mark.parametrize("saved_at", [
    *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 31)), 32, 33, 70,
])  # fmt: skip
def test_a_run_that_goes_back_into_a_merged_file_cuts_it(tmp_path, saved_at):
    store = RolloutStore(tmp_path)
    write_iterations(store, range(1, saved_at + 1))
    state = store.state()
    write_iterations(store, range(saved_at + 1, 80))
    store.stop()
    restored = RolloutStore(tmp_path)
    restored.set_state(state)
    write_iterations(restored, range(saved_at + 1, saved_at + 40))
    restored.stop()
    assert rows_in(tmp_path) == [(i, i) for i in range(1, saved_at + 40)]
    assert max(map(len, map(str.split, names_in(tmp_path)))) == 1 and len(names_in(tmp_path)) < 70


def test_a_merged_file_beside_those_that_it_contains_is_read_once_and_they_go(tmp_path):
    store = RolloutStore(tmp_path)
    write_iterations(store, range(1, 32))
    kept = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    write_iterations(store, [32])
    state = store.state()
    store.stop()
    for name, content in kept.items():  # as if the process had been killed before they were removed
        (tmp_path / name).write_bytes(content)
    assert rows_in(tmp_path) == [(i, i) for i in range(1, 33)]
    restored = RolloutStore(tmp_path)
    restored.set_state(state)
    write_iterations(restored, [33])
    restored.stop()
    assert names_in(tmp_path) == ["part-00000000-00000031.parquet", "part-00000032.parquet"]


def test_what_is_contained():
    names = ["part-00000003.parquet", "part-00000000-00000031.parquet", "part-00000031.parquet",
             "part-00000000-00001023.parquet", "part-00001024.parquet", "other.txt"]  # fmt: skip
    assert not_contained(names) == [names[3], names[4]]


def test_large_files_are_left_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("rllib_llm.data.rollout_store.MERGED_BYTES", 1000)
    store = RolloutStore(tmp_path)
    write_iterations(store, range(1, 41))
    store.stop()
    assert len(names_in(tmp_path)) == 40


@pytest.mark.parametrize("keep, made", [(10, 99), (300, 450)])
def test_rows_of_the_newest_iterations_are_kept_and_an_eighth_more_at_most(tmp_path, keep, made):
    store = RolloutStore(tmp_path, keep_iterations=keep)
    write_iterations(store, range(1, made + 1))
    store.stop()
    found = [iteration for iteration, _ in rows_in(tmp_path)]
    assert found == list(range(found[0], made + 1))
    assert keep <= len(found) <= keep * 9 / 8
    # Those of 300 are merged by 32; of 10, where a merged file would be more than is kept, none.
    files = len(list(tmp_path.glob("*.parquet")))
    assert files == 10 if keep == 10 else files < 300 / 32 + 32
