"""`rllib rollouts` as a user calls it."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.data.rollout_store import RolloutStore
from tests.cli.said import said
from tests.data.tiny_rollouts import group, put


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    store = RolloutStore(root / "grpo" / "GRPO_1" / "rollouts")
    put(store, 1, *group(1, [0.0, 1.0]))
    put(store, 2, *group(2, [0.5, 0.5], status="rejected"), reason="spread")
    store.stop()
    return root


def rollouts(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return said(result.output)


def test_the_best_are_shown_first(run):
    text = rollouts(run, "--sort", "score", "--show", "1")
    assert "rejected: 2 completions, 6 tokens, mean score 0.5" in text
    assert "trained: 2 completions, 6 tokens, mean score 0.5" in text
    assert "iteration 1 · prompt 1, completion 1 · trained · score 1 · reward 1 · correct 1" in text
    assert "prompt: 1+1= completion: 1" in text and "completion: 0" not in text


def test_turns_of_a_conversation_have_lines_of_their_own(tmp_path):
    store = RolloutStore(tmp_path / "rollouts")
    (row,) = group(1, [1.0])
    said = {"prompt": "[user] 6 * 7?", "completion": "[assistant] 42\n[user] Sure?",
            "messages": json.dumps([{"role": "user", "content": "6 * 7?"}])}  # fmt: skip
    put(store, 1, row | said)
    store.stop()
    result = CliRunner().invoke(app, ["rollouts", str(tmp_path)])
    assert "\nprompt: [user] 6 * 7?\ncompletion: [assistant] 42\n[user] Sure?\n" in result.output


def test_several_environments_are_named(tmp_path):
    store = RolloutStore(tmp_path / "rollouts")
    for number, env in enumerate(("math", "chat")):
        put(store, 1, *(row | {"env": env} for row in group(number, [0.0, number + 1.0])))
    store.stop()
    text = rollouts(tmp_path, "--sort", "score", "--show", "1")
    assert "math: 2 completions, 6 tokens, mean score 0.5" in text
    assert "iteration 1 · prompt 1, completion 1 · chat · trained · score 2" in text


def test_a_condition_chooses(run):
    text = rollouts(run, "--where", "status = 'rejected' AND sample = 0")
    assert "prompt 2, completion 0 · rejected (spread)" in text and "prompt 1," not in text


def test_columns_are_listed(run):
    text = rollouts(run, "--columns")
    assert "iteration" in text and "version_spans" in text


def test_rows_become_json_lines(run, tmp_path):
    file = tmp_path / "out" / "best.jsonl"
    assert "1 rows in" in rollouts(run, "-w", "score = 1", "--export", file)
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["completion"] == " 1" and json.loads(row["rewards"]) == {"correct": 1.0}


def test_rows_become_a_hugging_face_data_set(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    rollouts(run, "--export", folder)
    loaded = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 4 and loaded["completion"][:2] == [" 0", " 1"]


@pytest.mark.parametrize("arguments, message", [
    (["--where", "colour = 1"], "where='colour = 1' must be"),
    (["--sort", "colour"], "sort='colour' must be a column"),
    (["--where", "score > 9", "--export", "x.jsonl"], "must match at least one row"),
    (["--export", "x.csv"], "must end in .jsonl, or be a folder"),
])  # fmt: skip
def test_mistakes_are_said(run, arguments, message):
    assert message in rollouts(run, *arguments, exit_code=2)


def test_a_folder_without_rollouts(tmp_path):
    assert "kept its rollouts" in rollouts(tmp_path, exit_code=2)


def test_rows_become_packed_examples(tmp_path):
    store = RolloutStore(tmp_path / "rollouts")
    ids = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0]}
    put(store, 1, *[{**row, **ids} for row in group(1, [1.0, 0.0, 1.0])])
    store.stop()
    arguments = ("--export", tmp_path / "packed", "--as", "examples")
    assert "2 rows in" in rollouts(tmp_path, *arguments, "--length", 10)
    (file,) = (tmp_path / "packed").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [row["segment_ids"] for row in rows] == [[1] * 5 + [2] * 5, [1] * 5 + [0] * 5]
