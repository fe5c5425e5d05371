"""Rollouts that are read: conditions, order, and what a later stage learns from them."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from rllib_llm.data.preferences import PreferenceSource
from rllib_llm.data.rollout_store import RolloutStore
from rllib_llm.data.rollouts import (
    NoRolloutsError,
    open_rollouts,
    pairs_of_rollouts,
    query,
    rollout_folders,
    rollouts_by_trial,
    summary,
)
from rllib_llm.data.sources import load_rows
from rllib_llm.shared.errors import Problems
from tests.data.tiny_rollouts import group, put
from tests.tiny_models import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three iterations of one group of three; the second was rejected; one held-out row."""
    root = tmp_path_factory.mktemp("run")
    store = RolloutStore(root / "trial" / "rollouts")
    put(store, 0, *group(0, [9.0], status="evaluated"))
    put(store, 1, *group(1, [0.0, 1.0, 0.5]))
    put(store, 2, *group(2, [0.25, 0.25, 0.25], status="rejected"), reason="spread")
    put(store, 3, *group(3, [0.75, 0.0, 1.0], prompt="2+2="))
    store.stop()
    return root / "trial" / "rollouts"


@pytest.mark.parametrize("where, scores", [
    (None, [9.0, 0.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.75, 0.0, 1.0]),
    ("status = 'trained' AND score > 0.5", [1.0, 0.75, 1.0]),
    ("iteration BETWEEN 1 AND 2 AND NOT status = 'rejected'", [0.0, 1.0, 0.5]),
    ("prompt LIKE '2+%' OR (position IN (0, 7) AND score >= 9)", [9.0, 0.75, 0.0, 1.0]),
    ("status <> 'trained' AND reason IS NULL", []),
    ("valid AND score = 0", [0.0, 0.0]),
    ("(rewards->>'correct')::FLOAT > 0.5 AND status = 'trained'", [1.0, 0.75, 1.0]),
])  # fmt: skip
def test_conditions(folder, where, scores):
    found = query(open_rollouts([folder]), where=where)
    assert found.column("score").to_pylist() == scores


def test_order_and_number(folder):
    rollouts = open_rollouts([folder])
    best = query(rollouts, sort="score", limit=3)
    assert [(r["iteration"], r["score"]) for r in best.to_pylist()] == [(0, 9), (1, 1), (3, 1)]
    worst = query(rollouts, sort="score asc", limit=1, columns=["score"])
    assert worst.to_pylist() == [{"score": 0.0}]


@pytest.mark.parametrize("sort", [None, "score", "score asc", "prompt"])
def test_the_first_rows_are_the_same_with_duckdb_and_without(tmp_path, monkeypatch, sort):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [0.5, float("nan"), 1.0]))
    put(store, 2, *group(2, [0.25, 1.0, float("nan"), -1.0], prompt="2+2="))
    store.stop()
    with_duckdb = query(open_rollouts([tmp_path]), sort=sort, limit=6)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    without = query(open_rollouts([tmp_path]), sort=sort, limit=6)
    assert with_duckdb.schema == without.schema and len(without) == 6
    assert str(with_duckdb.to_pylist()) == str(without.to_pylist())  # NaN is not equal to itself


@pytest.mark.parametrize("question", [{"where": "score > 0"}, {"limit": 1}, {}])
def test_a_file_that_was_merged_meanwhile_is_no_wrong_condition(tmp_path, question):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [1.0]))
    store.stop()
    rollouts = open_rollouts([tmp_path])
    next(tmp_path.glob("*.parquet")).unlink()
    with pytest.raises(FileNotFoundError):
        query(rollouts, **question)


@pytest.mark.parametrize("where", ["score >", "colour = 'red'", "score > 1 )", "DROP TABLE x"])
def test_what_cannot_be_read_is_said(folder, where):
    with pytest.raises(Problems, match="where=.* must be"):
        query(open_rollouts([folder]), where=where)


def test_a_misspelt_column_is_told_with_the_one_it_resembles(folder):
    with pytest.raises(Problems, match='Candidate bindings: "score"'):
        query(open_rollouts([folder]), where="scor > 1")


def test_a_condition_without_duckdb_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    rollouts = open_rollouts([folder])
    with pytest.raises(Problems, match=r"pip install 'rllib-llm\[rollouts\]'"):
        query(rollouts, where="score > 1")
    assert len(query(rollouts)) == 10 and len(load_rows(str(folder))) == 9


def test_words_of_a_text_choose_no_rows_that_are_held_out(tmp_path):
    store = RolloutStore(tmp_path)
    put(store, 1, *group(1, [0.0, 1.0], prompt="is it valid?"))
    put(store, 1, *group(2, [9.0], prompt="is it valid?", status="evaluated"))
    store.stop()
    chosen = load_rows({"path": str(tmp_path), "where": "prompt LIKE '%valid%'"})
    assert [row["score"] for row in chosen] == [0.0, 1.0]


def test_rows_without_a_score_are_neither_the_best_nor_half_of_a_pair(tmp_path):
    store = RolloutStore(tmp_path)
    rows = zip(group(1, [0, 0]), [None, float("nan")], strict=True)
    unscored = [{**row, "score": score, "valid": False} for row, score in rows]
    scored = [{**row, "sample": 2 + row["sample"]} for row in group(1, [0.0, 1.0])]
    put(store, 1, *unscored, *scored)
    store.stop()
    every = {"path": str(tmp_path), "where": "status = 'trained'"}
    assert len(load_rows(every)) == 4
    assert [row["score"] for row in load_rows({**every, "best_of_group": 1})] == [1.0]
    (pair,) = pairs_of_rollouts(load_rows(every))
    assert (pair["chosen"], pair["rejected"]) == (" 1", " 0")
    with pytest.raises(Problems, match="hold at least one row"):
        load_rows({"path": str(tmp_path), "where": "NOT valid", "best_of_group": 1})


def test_an_unknown_column_to_sort_by(folder):
    with pytest.raises(Problems, match="sort='colour' must be a column"):
        query(open_rollouts([folder]), sort="colour")


def test_a_run_holds_the_rollouts_of_its_trials(folder, tmp_path):
    assert rollout_folders(folder.parents[1]) == [folder] == rollout_folders(folder)
    assert rollout_folders(folder.parent / "checkpoint_000003") == [folder]
    with pytest.raises(NoRolloutsError, match="kept its rollouts"):
        rollout_folders(tmp_path)


def test_the_rollouts_of_a_run_that_stores_them_elsewhere(folder, tmp_path):
    trial, elsewhere = tmp_path / "run" / "stage" / "trial", tmp_path / "elsewhere"
    trial.mkdir(parents=True)
    (trial / "params.json").write_text(json.dumps({"rollouts_path": str(elsewhere)}))
    shutil.copytree(folder, elsewhere / "trial")
    found = {trial: elsewhere / "trial"}
    assert rollouts_by_trial(tmp_path / "run") == rollouts_by_trial(trial) == found
    assert rollout_folders(elsewhere) == [elsewhere / "trial"]


def test_a_folder_of_runs_is_answered_with_the_run(folder, tmp_path):
    run = tmp_path / "results" / "run"
    shutil.copytree(folder.parent, run / "stage" / "trial")
    with pytest.raises(NoRolloutsError, match=rf"kept its rollouts. Name one of {run}\."):
        rollout_folders(tmp_path / "results")


def test_a_misspelt_run_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "results").mkdir()
    with pytest.raises(NoRolloutsError, match="there is none. Did you mean 'results'"):
        rollout_folders(tmp_path / "resultx")


def test_a_later_stage_learns_from_them(folder):
    rows = load_rows(str(folder))
    assert len(rows) == 9  # the held-out one is not learnt from
    assert rows[0]["prompt"] == "1+1=" and rows[0]["completion"] == " 0"
    best = load_rows({"path": str(folder), "best_of_group": 1, "where": "status = 'trained'"})
    assert [row["completion"] for row in best] == [" 1", " 1"]
    good = load_rows({"path": str(folder), "where": "score >= 0.5"})
    assert sorted(row["score"] for row in good) == [0.5, 0.75, 1.0, 1.0]


def test_best_and_worst_of_a_group_are_a_pair(folder, tokenizer):
    pairs = PreferenceSource(str(folder), tokenizer=tokenizer, max_length=16, shuffle=False)
    assert len(pairs) == 2  # the rejected group has one score
    assert pairs._rows[1] == {"prompt": "2+2=", "chosen": " 1", "rejected": " 0"}
    with pytest.raises(Problems, match="a group with two scores"):
        PreferenceSource(
            {"path": str(folder), "where": "status = 'rejected'"}, tokenizer=tokenizer,
            max_length=16,
        )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize("options, message", [
    ({"where": "colour = 1"}, "data.where=.* must be"),
    ({"best_of_group": 0}, r"data.best_of_group=0 must be an integer of at least 1"),
    ({"where": "score > 99"}, "must hold at least one row"),
])  # fmt: skip
def test_options_that_cannot_be(folder, options, message):
    with pytest.raises(Problems, match=message):
        load_rows({"path": str(folder), **options})


def test_a_condition_on_other_data_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(Problems, match="holds no rollouts of a run"):
        load_rows({"path": str(file), "where": "text = 'a'"})


def test_a_rollout_of_several_rows_is_counted_once(tmp_path):
    """One rollout of two rows, 3 tokens each, score 1, and one of one row, score 0."""
    store = RolloutStore(tmp_path)
    forked, other = group(1, [1.0, 0.0])
    put(store, 1, forked, {**forked, "row": 1}, other)
    store.stop()
    counted = summary(open_rollouts([tmp_path]))
    assert counted == {"trained": {"completions": 2, "tokens": 9, "score": 0.5}}
    best = load_rows({"path": str(tmp_path), "best_of_group": 1})
    assert [row["score"] for row in best] == [1.0, 1.0]  # all of the best rollout
    assert query(open_rollouts([tmp_path])).column("row").to_pylist() == [0, 1, 0]


def test_only_answers_to_the_same_prompt_are_a_pair(tmp_path):
    """An environment may begin the conversations of one task in several ways: the worst answer of
    the group stood behind a prompt that it did not answer."""
    one, two, three = group(1, [1.0, 0.5, 0.0])
    store = RolloutStore(tmp_path)
    put(store, 1, one, two, {**three, "prompt": "another"})
    store.stop()
    (pair,) = pairs_of_rollouts(load_rows(str(tmp_path)))
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("1+1=", " 1", " 0.5")
